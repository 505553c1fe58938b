"""What is installed: every package, every data file, and only pinned versions."""

from __future__ import annotations

import fnmatch
import re
import tomllib
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


def is_included(package: str) -> bool:
    patterns = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    return any(fnmatch.fnmatchcase(package, pattern) for pattern in patterns)


def list_files() -> list[Path]:
    files = [path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()]
    return [path.relative_to(ROOT) for path in files if "__pycache__" not in path.parts]


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_included_and_typed(package: str) -> None:
    assert is_included(package)
    assert (ROOT / package / "py.typed").exists()


def test_no_module_lies_outside_a_package() -> None:
    folders = {path.parent for path in list_files() if path.suffix == ".py"}
    assert folders
    for folder in folders:
        assert (ROOT / folder / "__init__.py").exists(), f"{folder} is no package: setuptools would leave it out"
        assert is_included(".".join(folder.parts))


def test_every_data_file_is_installed() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["*"]
    for path in list_files():
        if path.suffix not in (".py", ".pyc"):
            assert any(fnmatch.fnmatchcase(path.name, pattern) for pattern in patterns), path


def test_only_these_packages_are_installed() -> None:
    others = [path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name not in PACKAGES]
    assert others
    assert not [name for name in others if is_included(name)]


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
    assert PROJECT["project"]["scripts"] == {"bexp": "api.cli:main"}
    assert PROJECT["project"]["requires-python"] == ">=3.11"


def test_the_changelog_has_this_version() -> None:
    assert f"## [{PROJECT['project']['version']}]" in (ROOT / "CHANGELOG.md").read_text()
