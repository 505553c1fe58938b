"""The end of a command's processes: those that are left, and which of them caused it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

import psutil

from bexp.explorer.records.measurement import Outcome
from bexp.tune.link import SOCKET, failures_in
from bexp.workers.process.exit_status import classify_exit
from bexp.workers.targets.custom.process import last_lines


def started_with(address: str) -> list[psutil.Process]:
    """Return the processes that know a trial's socket, also those without their parent or outside its session."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(SOCKET) == address:
                found.append(process)
    return found


_ROOT_CAUSE = re.compile(r"Root Cause.*?^\s*rank\s*: (\d+).*?^\s*exitcode\s*: (-?\d+)", re.DOTALL | re.MULTILINE)
"""torchrun's text about the process that ended first."""
_ENDED = re.compile(r"^\s*rank\s*: (\d+)", re.MULTILINE)
"""torchrun's line for each process that did not end well."""
_LOST = re.compile(r"(?:closed|reset) by peer|remote process exited|broken pipe", re.IGNORECASE)
"""Texts of errors because another process is gone."""
_OWN_LINE = re.compile(r"[WE]\d{4} ")
"""The beginning of torchrun's own lines, which follow the training's."""
_ELSE = re.compile(r"\[rank\d+\]:|\s|.*Warning: |terminate called ")
"""The beginning of lines that are no process's last word: of an error that another one has raised, or of a warning."""


def forget_failures(folder: Path) -> None:
    """Remove the notes of failures in an earlier start."""
    for path in failures_in(folder):
        path.unlink()


def cause_of(folder: Path, output: Sequence[str], *, kernel_killed: bool) -> tuple[Outcome, str] | None:
    """Return the outcome and the reason of the process that caused the end; None if it is not known.

    A lack of memory comes first, because the others fail after it. Next is the process that torchrun names, even if it
    was killed or raised no error. Last is the first process that failed. torchrun may name a process that has only lost
    its connection to another one that was still ending. Then that other process is the cause.
    """
    notes = []
    for path in sorted(failures_in(folder), key=lambda path: path.stat().st_mtime_ns):
        with suppress(ValueError):  # its process was ended while it wrote
            notes.append(json.loads(path.read_text()))
    text = "\n".join(output)
    ended = _ROOT_CAUSE.search(text)
    named = None if ended is None else int(ended[1])
    causes = [note for note in notes if note["outcome"] == Outcome.OUT_OF_MEMORY]
    causes += [note for note in notes if named in (None, note["rank"])]
    lines = [line for line in takewhile(lambda line: not _OWN_LINE.match(line), output) if not _ELSE.match(line)]
    silent = {int(rank) for rank in _ENDED.findall(text)} - {note["rank"] for note in notes}
    if causes and silent and lines and _LOST.search(causes[0]["reason"]):
        return Outcome.CRASHED, f"rank {min(silent)} ended first: {' '.join(last_lines(lines, 1))}"
    if causes:
        return Outcome(causes[0]["outcome"]), f"rank {causes[0]['rank']}: {causes[0]['reason']}"
    if ended is None:
        return None
    status = int(ended[2])
    return classify_exit(f"rank {named}", status, "" if status < 0 else " ".join(last_lines(lines, 1)), kernel_killed)
