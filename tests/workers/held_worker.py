"""A worker whose profiler stands still in the middle of one trial: `python -m tests.workers.held_worker`.

The file BEXP_TEST_HOLD names that trial: its number, or `whole` for the first whole model on a mesh. The profiler's
last process is stopped as it gets that trial, so that the trial lasts until somebody ends it, however fast or slow the
machine is. The file is then removed, which tells the test that the trial has begun.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from bexp.explorer.model.base import Frozen
from bexp.explorer.records.trial import TrialTask
from bexp.workers.__main__ import main
from bexp.workers.process.child import ProfilerProcess
from bexp.workers.process.protocol import RunTrial

VARIABLE = "BEXP_TEST_HOLD"


def hold(file: Path) -> None:
    """Stop the profiler in the trial that `file` names."""
    send = ProfilerProcess.send

    def send_and_stop(self: ProfilerProcess, command: Frozen) -> None:
        is_held = isinstance(command, RunTrial) and file.exists() and _is_named(command.task, file.read_text())
        if is_held:
            os.kill(self._ranks[-1].pid if self._ranks else self.pid, signal.SIGSTOP)
        send(self, command)
        if is_held:
            file.unlink()

    ProfilerProcess.send = send_and_stop  # type: ignore[method-assign]  # as itself, to a process that stands still


def _is_named(task: TrialTask, name: str) -> bool:
    return task.shared_run is not None if name == "whole" else task.number == int(name)


if __name__ == "__main__":
    hold(Path(os.environ[VARIABLE]))
    sys.exit(main())
