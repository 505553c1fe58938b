"""Child processes of the service. They import nothing from the working directory."""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Mapping
from pathlib import Path

PACKAGES_FOLDER = Path(__file__).absolute().parents[1]
"""Holds `bexp`: site-packages, or the root of a checkout, whose other folders an editable installation maps."""


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
