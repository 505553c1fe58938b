"""The environment of a result, and how a result is written to a file."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    *("torch", "triton", "nvidia-cudnn-cu13", "transformers", "accelerate"),
    *("optuna", "numpy", "sqlalchemy", "fastapi", "pydantic"),
)


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


def is_of_these_kernels(results: dict[str, Any]) -> bool:
    """Whether results are of the expert kernels as they are now; those without a digest are of earlier ones."""
    from bexp.kernels.experts.auto.digest import kernels_digest  # noqa: PLC0415 - imports torch

    return results.get("kernels") == kernels_digest()


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Replace `path` in one step, so that an interrupted run leaves the last whole state."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(results, indent=1) + "\n")
    draft.replace(path)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
