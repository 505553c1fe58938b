"""What is installed: every package, every data file, and only pinned versions."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ("bexp", "explorer", "storage", "workers", "api")


def read_pins() -> dict[str, str]:
    pins = [line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line]
    return {canonicalize_name(name): version for name, version in pins}


SERVICE = ("api", "explorer", "storage", "workers")


def list_files() -> list[Path]:
    files = [path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()]
    return [path.relative_to(ROOT) for path in files if "__pycache__" not in path.parts]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The files of the wheel that is built from the files of this checkout."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in (*PACKAGES, "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, built], cwd=source, check=True, capture_output=True)
    (path,) = built.glob("*.whl")
    return set(zipfile.ZipFile(path).namelist())


def test_the_wheel_installs_one_name_with_every_module_and_data_file(wheel: set[str]) -> None:
    """Folders called `api` or `workers` in site-packages would hide a person's own, or be hidden by them."""
    expected = {path.as_posix() if path.parts[0] == "bexp" else f"bexp/{path.as_posix()}" for path in list_files()}
    assert {name for name in wheel if not name.startswith("bexp-")} == expected
    assert not {f"bexp/{name}" for name in SERVICE} & {path.as_posix() for path in list_files()}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").exists()


def walk_requirements() -> set[str]:
    """Every distribution that an installation with the extra `dev` needs on this machine."""
    needed: set[str] = set()
    queue = [Requirement("bexp[dev]")]
    seen: set[tuple[str, frozenset[str]]] = set()
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        if (name, frozenset(requirement.extras)) in seen:
            continue
        seen.add((name, frozenset(requirement.extras)))
        needed.add(name)
        try:
            texts = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        for text in texts:
            inner = Requirement(text)
            extras = requirement.extras or {""}
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in extras):
                queue.append(inner)
    return needed - {"bexp"}


def test_every_dependency_is_pinned_to_a_version_that_it_allows() -> None:
    pins = read_pins()
    texts = PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["dev"]
    for requirement in map(Requirement, texts):
        name = canonicalize_name(requirement.name)
        assert name in pins, f"constraints.txt does not pin {name}"
        assert requirement.specifier.contains(pins[name]), f"{name}=={pins[name]} is not {requirement}"


def test_what_the_dependencies_need_is_pinned_too() -> None:
    """But for what comes with a CUDA build of torch, whose versions torch pins itself."""
    with_cuda = re.compile(r"nvidia-(?!ml-py)|cuda-|triton")
    unpinned = {name for name in walk_requirements() - read_pins().keys() if not with_cuda.match(name)}
    assert not unpinned


def test_the_command_line_is_installed() -> None:
    assert PROJECT["project"]["scripts"] == {"bexp": "bexp.api.cli:main"}
    assert PROJECT["project"]["requires-python"] == ">=3.11"


def test_the_changelog_has_this_version() -> None:
    assert f"## [{PROJECT['project']['version']}]" in (ROOT / "CHANGELOG.md").read_text()
