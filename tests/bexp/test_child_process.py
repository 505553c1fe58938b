"""What processes import: nothing from where a person stands, and no library that they do not need. How they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from bexp.child_process import PACKAGES_FOLDER, module_command, safe_environment
from tests.waits import wait_until

HOSTILE_PACKAGES = ("api", "workers", "storage", "explorer", "bexp")
HOSTILE_MODULES = ("torch", "random", "json", "socket", "sitecustomize")


def write_hostile_packages(folder: Path) -> Path:
    """Fill a folder with modules that have the names of ours and of others.

    Each fails when it is imported, and notes that in the file whose path is returned.
    """
    imported = folder / "imported"
    code = f"open({str(imported)!r}, 'a').write(__name__ + chr(10))\nraise RuntimeError(__name__)\n"
    for name in HOSTILE_PACKAGES:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(code)
    for name in HOSTILE_MODULES:
        (folder / f"{name}.py").write_text(code)
    return imported


def test_an_unsafe_child_would_import_from_the_folder(tmp_path: Path) -> None:
    """The folder is hostile indeed: Python's usual way to start a module runs its code."""
    imported = write_hostile_packages(tmp_path)
    command = [sys.executable, "-m", "bexp.workers", "doctor"]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES_FOLDER)}
    assert subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False).returncode
    assert imported.exists()


def test_a_folder_with_the_whole_package_is_found_by_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bexp" / "workers").mkdir(parents=True)
    monkeypatch.setattr("bexp.child_process.PACKAGES_FOLDER", tmp_path)
    assert safe_environment({"PYTHONPATH": "/other"})["PYTHONPATH"] == os.pathsep.join((str(tmp_path), "/other"))
    monkeypatch.setattr("site.getsitepackages", lambda: [str(tmp_path)])
    assert "PYTHONPATH" not in safe_environment({}), "it is installed"


def test_a_persons_packages_and_folders_of_the_same_names_work_beside_bexp(tmp_path: Path) -> None:
    names = ("api", "workers", "storage", "explorer")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text("OWNER = 'the person'")
    for name in names[:2]:
        (tmp_path / name / "__init__.py").touch()
    code = f"""
import sys; sys.path.insert(0, '')
import {", ".join(f"{name}.mine" for name in names)}
import bexp.api.cli, bexp.workers.settings, bexp.storage.queue, bexp.explorer.search.explore, torch
weight = torch.nn.Parameter(torch.ones(8, 8))
found = bexp.explore(step=lambda x: (x @ weight).sum().backward(), batch=lambda m: torch.ones(m, 8), sizes=(1, 4))
assert found.confidence is not None, found
assert {{m.mine.OWNER for m in ({", ".join(names)})}} == {{'the person'}}
"""
    child = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr


def test_a_child_runs_a_module_without_the_working_directory() -> None:
    assert module_command("bexp.workers", "--job") == [sys.executable, "-P", "-m", "bexp.workers", "--job"]


def imported(statement: str) -> set[str]:
    """The top-level packages, and those right below `bexp`, that a fresh interpreter has loaded after `statement`."""
    script = f"{statement}\nimport sys\nprint(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    names = [name.split(".") for name in found.stdout.split()]
    return {name[0] for name in names} | {".".join(name[:2]) for name in names if name[0] == "bexp"}


def test_importing_the_package_loads_no_torch() -> None:
    assert not imported("import bexp, bexp.kernels, bexp.measure, bexp.measure.nvml") & {
        "torch",
        "triton",
        "transformers",
        "pydantic",
    }


def test_exploring_a_configuration_loads_no_torch_and_no_service() -> None:
    unwanted = {"torch", "sqlalchemy", "bexp.storage", "bexp.workers", "bexp.api"}
    assert not imported("import bexp.config_exploration") & unwanted


def test_the_settings_of_workers_which_profilers_read_load_no_database() -> None:
    assert not imported("import bexp.workers.settings") & {"sqlalchemy", "torch"}


def test_the_kernels_and_the_measuring_load_no_service_no_triton_no_transformers_and_no_compiler() -> None:
    kernels = "bexp.kernels.attention, bexp.kernels.router, bexp.kernels.experts.registry"
    unwanted = {"bexp.storage", "bexp.workers", "bexp.api", "transformers", "pydantic", "sqlalchemy", "triton"}
    compiler = {"sympy"}  # torch's compiler imports it, and torch itself does not
    assert not imported(f"import {kernels}, bexp.measure.memory_meters, bexp.measure.timing") & (unwanted | compiler)


FORKED = """
import os, signal
from bexp.child_process import end_with_parent
parent, (ready, says) = os.getpid(), os.pipe()
if child := os.fork():
    os.read(ready, 1)
    print(child, flush=True)
elif end_with_parent(parent):
    os.write(says, b"1")
signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such request")
def test_a_process_ends_with_its_killed_parent() -> None:
    command = [sys.executable, "-c", FORKED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as parent:
        try:
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            parent.kill()
            parent.wait()
            wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)
