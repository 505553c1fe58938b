"""What is installed: every package, every data file, and only pinned versions."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_string
from email.message import Message
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.testing import CliRunner

from bexp.api.cli import app
from bexp.storage.database import open_database

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ("bexp", "explorer", "storage", "workers", "api")


def read_pins() -> dict[str, str]:
    pins = [line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line]
    return {canonicalize_name(name): version for name, version in pins}


def list_files() -> list[Path]:
    files = [path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()]
    return [path.relative_to(ROOT) for path in files if "__pycache__" not in path.parts]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    """The wheel that is built from the files of this checkout."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in (*PACKAGES, "tests"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, built], cwd=source, check=True, capture_output=True)
    (path,) = built.glob("*.whl")
    return zipfile.Path(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.Path) -> Message:
    (folder,) = [entry for entry in wheel.iterdir() if entry.name.endswith(".dist-info")]
    return message_from_string((folder / "METADATA").read_text(encoding="utf-8"))


def test_the_wheel_installs_one_name_with_every_module_and_data_file(wheel: zipfile.Path) -> None:
    """Folders called `api` or `workers` in site-packages would hide a person's own, or be hidden by them."""
    expected = {path.as_posix() if path.parts[0] == "bexp" else f"bexp/{path.as_posix()}" for path in list_files()}
    files = {name for name in wheel.root.namelist() if not name.endswith("/")}
    assert {name for name in files if not name.startswith("bexp-")} == expected


def requirements(metadata: Message, extra: str) -> set[str]:
    """The distributions that an extra adds to the base; those of the base if it is empty."""
    found = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    base = {one.name for one in found if one.marker is None}
    chosen = {one.name for one in found if one.marker is not None and one.marker.evaluate({"extra": extra})}
    return chosen if extra else base


def test_a_trainer_installs_no_service(metadata: Message) -> None:
    service = requirements(metadata, "service")
    assert service == {"fastapi", "prometheus-client", "psycopg", "uvicorn"}
    assert {"torch", "optuna", "sqlalchemy", "alembic", "typer"} <= requirements(metadata, "")
    assert not service & requirements(metadata, "")


def test_the_metadata_is_whole_and_claims_no_licence(metadata: Message) -> None:
    assert metadata["Summary"] and metadata["Keywords"] and metadata["Description-Content-Type"] == "text/markdown"
    python = [text.rpartition(" ")[2] for text in metadata.get_all("Classifier", []) if ":: Python ::" in text]
    (least, beyond) = re.findall(r"\((3, \d+)\)", (ROOT / "Makefile").read_text())
    assert python == [f"3.{minor}" for minor in range(int(least[3:]), int(beyond[3:]))]
    assert not any("licen" in f"{name}{value}".lower() for name, value in metadata.items() if name != "Description")


def test_what_needs_the_service_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """import-linter checks that nothing else needs it."""
    for module in ("bexp.api.serve", "bexp.api.listener"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    ended = CliRunner().invoke(app, ["serve"])
    said = "bexp: this command needs uvicorn, which is missing: pip install 'bexp[service]'\n"
    assert (ended.exit_code, ended.stderr) == (2, said)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ValueError, match=r"PostgreSQL needs psycopg, .*bexp\[service\]"):
        open_database("postgresql://bexp@127.0.0.1/bexp")


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
    extras = PROJECT["project"]["optional-dependencies"]
    texts = PROJECT["project"]["dependencies"] + extras["service"] + extras["mcp"] + extras["dev"]
    for requirement in map(Requirement, texts):
        name = canonicalize_name(requirement.name)
        if name == "bexp":
            continue
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


def test_neither_the_service_nor_a_command_that_reads_imports_what_a_search_needs() -> None:
    """Those take a second to import, and much memory."""
    code = (
        "import bexp.api.app, bexp.api.stored, sys; print({'numpy', 'scipy', 'optuna', 'torch'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
