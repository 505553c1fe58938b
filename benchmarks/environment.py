"""The environment of a result, and how a result is written to a file, or continued."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bexp.explorer.model.expert_kernels import NAMED_EXPERTS
from bexp.targets.registry import version_of

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
        "packages": {name: installed for name in PACKAGES if (installed := version_of(name)) is not None},
    }


def describe_commit() -> str | None:
    """The commit that runs, marked if files differ from it: what BENCHMARKED_COMMIT says, else the repository."""
    if given := os.environ.get("BENCHMARKED_COMMIT"):
        return given
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


OTHER_KERNELS = ("attention", "builds", "causal_loss", "loss", "recomputation", "tiling")
"""Modules beside the experts that these do not import: a change of theirs leaves the experts' speed as it was."""

_EXPERTS = ROOT / "bexp" / "kernels" / "experts"
_LEFT_OUT = {
    *(_EXPERTS.parent / f"{name}.py" for name in OTHER_KERNELS),
    *(_EXPERTS / f"{name}.py" for name in ("registry", "package")),
} | {path for name in NAMED_EXPERTS for path in (_EXPERTS / f"{name}.py", *(_EXPERTS / name).glob("*.py"))}
"""The registry names the kernels and runs none. Back ends that must be named are not ours, or seldom win."""


_SAME_CODE = {"733a619e9e31a3d9": "83535db53ff31a93"}
"""Digests whose kernels have the machine code of those of another one: compiled by Triton 3.6 for compute capability
9.0 without line numbers, all 92 binaries for three shapes are equal. Names of Gluon are others (`gluon_names`)."""


@functools.cache
def kernels_digest() -> str:
    """Return the hash of our expert kernels and of what launches them."""
    written: list[str] = []
    for path in (*_EXPERTS.parent.glob("*.py"), *_EXPERTS.rglob("*.py")):
        if path not in _LEFT_OUT:
            written += statements(path.read_text())
    digest = hashlib.sha256("\n".join(sorted(written)).encode()).hexdigest()[:16]
    return _SAME_CODE.get(digest, digest)


def statements(source: str) -> list[str]:
    """Return the statements of a Python source in one form, the same in all versions of Python that parse it alike."""
    return ["\n".join(_written(node)) for node in ast.parse(source).body if not _is_silent(node)]


def _written(node: object) -> Iterator[str]:
    """Yield a syntax tree in one form: what a version of Python does not know is empty in the others, and left out."""
    if isinstance(node, ast.JoinedStr):  # Python 3.12 ends some with an empty text
        node.values = [part for part in node.values if not (isinstance(part, ast.Constant) and part.value == "")]
    if isinstance(node, list):
        for item in node:
            if not _is_silent(item):
                yield from _written(item)
    elif isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        for name, value in ast.iter_fields(node):
            if isinstance(node, ast.Constant) or (value is not None and value != []):
                yield name
                yield from _written(value)
        yield ")"
    else:
        yield repr(node)


def _is_silent(node: object) -> bool:
    """Whether a statement takes no time in a run: an import, a text, or an operator's shapes for a compiler."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return any(isinstance(one, ast.Attribute) and one.attr == "register_fake" for one in decorators)
