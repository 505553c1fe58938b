"""Child processes of the service. They import nothing from the working directory."""

from __future__ import annotations

import ctypes
import os
import signal
import site
import sys
from collections.abc import Mapping
from pathlib import Path

PACKAGES_FOLDER = Path(__file__).absolute().parents[1]
"""Holds `bexp`: site-packages, or the root of a checkout, whose other folders an editable installation maps."""

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> bool:
    """Let the kernel kill this process when the thread that started it ends; return whether `parent` is still there.

    See prctl(2), PR_SET_PDEATHSIG. Other systems than Linux have no such request.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command line of a child that runs `module`. `-P` keeps Python from adding the working directory."""
    return [sys.executable, "-P", "-m", module, *arguments]


def safe_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment`, changed so that no descendant imports from the working directory.

    PYTHONSAFEPATH protects the child's own children, as `-P` protects the child. Entries of PYTHONPATH that mean the
    working directory leave, empty ones among them. If Python does not find the whole of `bexp` by itself, its folder
    comes first. So a child runs the same code as its parent.
    """
    entries = environment.get("PYTHONPATH", "").split(os.pathsep) if environment.get("PYTHONPATH") else []
    here = Path.cwd()
    kept = [entry for entry in entries if Path(entry).resolve() not in {here, PACKAGES_FOLDER}]
    is_whole = (PACKAGES_FOLDER / "bexp" / "workers").is_dir()
    if is_whole and str(PACKAGES_FOLDER) not in {*site.getsitepackages(), site.getusersitepackages()}:
        kept.insert(0, str(PACKAGES_FOLDER))
    safe = {**environment, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(kept)}
    return safe if kept else {name: value for name, value in safe.items() if name != "PYTHONPATH"}
