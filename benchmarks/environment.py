"""The environment of a result, and how a result is written to a file, or continued."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    *("torch", "triton", "nvidia-cudnn-cu13", "transformers", "accelerate"),
    *("optuna", "numpy", "sqlalchemy", "fastapi", "pydantic"),
)

DEVICE = ("device_kind", "device_name", "memory_bytes", "versions")
"""What a continued run must have alike of a device. Its measured peaks vary a little from run to run."""


def describe_environment() -> dict[str, Any]:
    """Date, host and versions; the device itself is in each result's HardwareSpec."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "packages": {name: installed for name in PACKAGES if (installed := _version(name)) is not None},
    }


def describe_commit() -> str | None:
    """The commit that runs, marked if files differ from it; None outside of a repository."""
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Replace `path` in one step, so that an interrupted run leaves the last whole state."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(results, indent=1) + "\n")
    draft.replace(path)


def begin(path: Path, fresh: dict[str, Any], *, same: Iterable[str]) -> dict[str, Any]:
    """Return `fresh`, which has measured nothing yet, or the results in `path` of the same run, with this day added.

    The same run has the same device, versions and values of the fields `same`.

    Raises:
        ValueError: the file is of another run, or no results.
    """
    if not path.exists():
        return fresh
    recorded: dict[str, Any] = json.loads(path.read_text())
    wanted = json.loads(json.dumps(fresh))
    names = {name: (recorded.get(name), wanted.get(name)) for name in same}
    names |= {name: (recorded["hardware"].get(name), wanted["hardware"].get(name)) for name in DEVICE}
    for name, (was, now) in names.items():
        if was != now:
            raise ValueError(f"{path} is of another run: {name} {was} instead of {now}. Name another file.")
    days = [*recorded.get("continued", []), datetime.now(UTC).isoformat(timespec="seconds")]
    return fresh | recorded | {"continued": days}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
