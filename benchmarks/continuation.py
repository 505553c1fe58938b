"""Continues a run that takes longer than one command may: results in its file are kept, and the rest is measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "nvidia-cudnn-cu13")
"""The packages that times depend on. Others may differ."""
KERNELS = "kernels"
"""The field that holds the digest of the kernels' sources."""
HARDWARE = ("device_kind", "device_name", "memory_bytes", "versions")
"""The fields that identify a device. Its measured peaks vary a little from run to run."""


def begin(path: Path, fresh: dict[str, Any], *, same: Iterable[str]) -> dict[str, Any]:
    """Return `fresh`, the results of a run that has measured nothing yet, or the results in `path` of the same run.

    The same run has the same packages, device and values of the fields `same`. Fields that an earlier version did not
    write are taken from `fresh`, except for `kernels`: a file without it is of earlier kernels. The day is added to the
    file's `continued`.

    Raises:
        ValueError: the file is of another run, or no results.
    """
    if not path.exists():
        return fresh
    recorded = _load(path)
    differences = _all_differences(recorded, fresh, same)
    if differences:
        said = "; ".join(differences.values())
        raise ValueError(f"{path} is of another run: {said}. Remove the file to measure anew, or name another.")
    day = datetime.now(UTC).isoformat(timespec="seconds")
    return fresh | recorded | {"continued": [*recorded.get("continued", []), day]}


def _load(path: Path) -> dict[str, Any]:
    try:
        recorded = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} cannot be continued: {error}") from error
    if not isinstance(recorded, dict) or "environment" not in recorded:
        raise ValueError(f"{path} cannot be continued: it has no results")
    return recorded


def _identity(results: dict[str, Any], same: Iterable[str]) -> dict[str, Any]:
    """Return what must agree, as it is in JSON."""
    packages = results["environment"].get("packages", {})
    agreed = {"packages": {name: packages.get(name) for name in PACKAGES}}
    named: dict[str, Any] = {name: results.get(name) for name in same if name in results or name == KERNELS}
    agreed |= named
    if results.get("hardware"):
        agreed["hardware"] = {name: results["hardware"][name] for name in HARDWARE if name in results["hardware"]}
    identity: dict[str, Any] = json.loads(json.dumps(agreed))
    return identity


def _all_differences(recorded: dict[str, Any], fresh: dict[str, Any], same: Iterable[str]) -> dict[str, str]:
    names = tuple(same)
    return dict(_differences("", _identity(recorded, names), _identity(fresh, names)))


def _differences(name: str, recorded: Any, wanted: Any) -> Iterator[tuple[str, str]]:
    """`shape.num_layers` with `shape.num_layers 16 instead of 8`, for all that is recorded and not as wanted."""
    if not (isinstance(recorded, dict) and isinstance(wanted, dict)):
        if recorded != wanted:
            yield name, f"{name} {_short(recorded)} instead of {_short(wanted)}"
        return
    for key, value in recorded.items():
        inner = f"{name}.{key}" if name else key
        if key in wanted:
            yield from _differences(inner, value, wanted[key])
        else:
            yield inner, f"{inner} {_short(value)} instead of none"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
