"""Child processes of the service import nothing from the folder that a person stands in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bexp.child_process import PACKAGES_FOLDER, module_command, safe_environment
from tests.acceptance.conftest import TINY
from tests.workers.profiler.samples import REQUEST, candidate, components_of, plan
from workers.process.profiler import Profiler

HOSTILE_PACKAGES = ("api", "workers", "storage", "explorer", "bexp")
HOSTILE_MODULES = ("torch", "random", "json", "socket", "sitecustomize")
SOURCES = ("api", "bexp", "explorer", "storage", "workers")


@pytest.fixture
def hostile_folder(tmp_path: Path) -> Path:
    """A project whose modules have the names of ours and of others; each notes its import, and fails."""
    folder = tmp_path / "project"
    folder.mkdir()
    code = f"open({str(tmp_path / 'imported')!r}, 'a').write(__name__ + chr(10))\nraise RuntimeError(__name__)\n"
    for name in HOSTILE_PACKAGES:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(code)
    for name in HOSTILE_MODULES:
        (folder / f"{name}.py").write_text(code)
    return folder


def assert_nothing_imported(folder: Path) -> None:
    imported = folder.parent / "imported"
    assert not imported.exists(), imported.read_text()


def test_an_unsafe_child_would_import_from_the_folder(hostile_folder: Path) -> None:
    """The folder is hostile indeed: Python's usual way to start a module runs its code."""
    command = [sys.executable, "-m", "workers", "doctor"]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES_FOLDER)}
    assert subprocess.run(command, cwd=hostile_folder, env=environment, capture_output=True, check=False).returncode
    assert (hostile_folder.parent / "imported").exists()


def test_a_profiler_of_a_group_imports_nothing_from_the_working_directory(
    hostile_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(hostile_folder)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(("", str(PACKAGES_FOLDER)))}
    with Profiler(("cpu", "cpu"), environment=environment) as profiler:
        profiler.begin(REQUEST)
        chosen = candidate(1)
        assert profiler.measure(plan(chosen, components_of(chosen)[:1])).outcome == "ok"
    assert_nothing_imported(hostile_folder)


@pytest.mark.slow
def test_an_exploration_imports_nothing_from_the_working_directory(hostile_folder: Path, tmp_path: Path) -> None:
    """`bexp explore` with API, worker and profiler, from a folder of copied packages without the rest of a checkout."""
    root = tmp_path / "installed"
    for name in SOURCES:
        shutil.copytree(PACKAGES_FOLDER / name, root / name)
    import yaml

    (hostile_folder / "tiny.yaml").write_text(yaml.safe_dump(TINY | {"budget": {"max_trials": 1}}))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BEXP_")}
    environment |= {
        "PYTHONPATH": str(root),
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "TMPDIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    run = subprocess.run(
        [sys.executable, "-P", "-m", "api.cli", "explore", "tiny.yaml", "--device", "cpu"],
        cwd=hostile_folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert_nothing_imported(hostile_folder)


def test_the_working_directory_leaves_the_path_and_other_entries_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "other"
    given = {"PYTHONPATH": os.pathsep.join(("", ".", str(tmp_path), str(other))), "HOME": "/root"}
    safe = safe_environment(given)
    assert safe["PYTHONPATH"].split(os.pathsep) == [str(PACKAGES_FOLDER), str(other)]
    assert (safe["PYTHONSAFEPATH"], safe["HOME"]) == ("1", "/root")


def test_an_installed_package_needs_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("site.getsitepackages", lambda: [str(PACKAGES_FOLDER)])
    assert "PYTHONPATH" not in safe_environment({})


def test_a_child_runs_a_module_without_the_working_directory() -> None:
    assert module_command("workers", "--once") == [sys.executable, "-P", "-m", "workers", "--once"]
