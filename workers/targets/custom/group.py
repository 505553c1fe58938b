"""Why several processes of a training have ended: one is the cause, and the others know only that it is gone."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from bexp.explorer.records.measurement import Outcome
from bexp.tune.link import failures_in
from bexp.workers.process.exit_status import classify_exit
from bexp.workers.targets.custom.process import last_lines

_ROOT_CAUSE = re.compile(r"Root Cause.*?^\s*rank\s*: (\d+).*?^\s*exitcode\s*: (-?\d+)", re.DOTALL | re.MULTILINE)
"""What torchrun prints of the process that ended first."""
_ENDED = re.compile(r"^\s*rank\s*: (\d+)", re.MULTILINE)
"""How it lists each process that did not end well."""
_LOST = re.compile(r"(?:closed|reset) by peer|remote process exited|broken pipe", re.IGNORECASE)
"""What is said of another process that is gone."""
_OWN_LINE = re.compile(r"[WE]\d{4} ")
"""How a line of its own begins: what stands before it is the training's."""
_ELSE = re.compile(r"\[rank\d+\]:|\s|.*Warning: |terminate called ")
"""How lines begin that are no process's last word: of an error that another one has raised, or of a warning."""


def forget_failures(folder: Path) -> None:
    """Remove what the processes of an earlier start have left."""
    for path in failures_in(folder):
        path.unlink()


def cause_of(folder: Path, output: Sequence[str], *, kernel_killed: bool) -> tuple[Outcome, str] | None:
    """Return the outcome and the reason of the process that was the cause; None if none can be told.

    A lack of memory comes first, because the others fail after it. Next is the process that torchrun names, which may
    have been killed or may have raised no error, and then the first that failed. torchrun may name one that has only
    lost its connection to another, which was still ending: then that one is the cause.
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
