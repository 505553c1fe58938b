"""Forked processes, each in a copy of the committed files."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def copy_tree(commit: str) -> Path:
    """A copy of the committed files, for one lane of test processes."""
    tree = Path(tempfile.mkdtemp(prefix="mutation-"))
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive, check=True)
    for room in ("api", "explorer", "storage", "workers"):  # as they are installed
        (tree / "bexp" / room).symlink_to(tree / room)
    return tree


def in_process(tree: Path, work: Callable[[], Any], processor_seconds: int = 0, wall_seconds: float = math.inf) -> Any:
    """What `work` returns in a forked process that stands in `tree`; its exit status or "timeout" if it dies."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            os.chdir(tree)
            os.environ["PYTHONPATH"] = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
            sys.path[:] = [str(tree), *(entry for entry in sys.path if entry not in ("", str(ROOT)))]
            for name in [name for name in sys.modules if name.split(".")[0] == "benchmarks"]:
                del sys.modules[name]
            sys.dont_write_bytecode = False
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            if processor_seconds:
                resource.setrlimit(resource.RLIMIT_CPU, (processor_seconds, processor_seconds + 2))
            with os.fdopen(writing, "w") as answer:
                json.dump(work(), answer)
        except BaseException:  # noqa: BLE001 - the process ends here; the file says why
            (tree / "error.txt").write_text(traceback.format_exc())
        finally:
            os._exit(1)
    os.close(writing)
    os.set_blocking(reading, False)
    end, said = time.monotonic() + wall_seconds, b""
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end:
        said += _read(reading)
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what a test started, too
    if ended[0] == 0:
        os.waitpid(child, 0)
    said += _read(reading)
    os.close(reading)
    try:
        return json.loads(said)
    except ValueError:
        return "timeout" if ended[0] == 0 or os.WIFSIGNALED(ended[1]) else "died"


def _read(pipe: int) -> bytes:
    said = b""
    with contextlib.suppress(BlockingIOError):
        while piece := os.read(pipe, 1 << 20):
            said += piece
    return said


def in_lanes(trees: Sequence[Path], work: Callable[[int, Path], Iterable[Any]]) -> list[Any]:
    """Run `work` for each tree at the same time, and collect what it yields."""
    lanes = []
    for lane, tree in enumerate(trees):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            with os.fdopen(writing, "w") as answer:
                json.dump(list(work(lane, tree)), answer)
            os._exit(0)
        os.close(writing)
        lanes.append((child, reading))
    outcomes: list[Any] = []
    for child, reading in lanes:
        with os.fdopen(reading) as answer:
            said = answer.read()
        os.waitpid(child, 0)
        outcomes += json.loads(said)
    return outcomes
