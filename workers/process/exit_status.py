"""The reason why a process ended by itself, from its exit status, its last output and the kernel."""

from __future__ import annotations

import signal
from pathlib import Path

from bexp.explorer.records.measurement import Outcome
from bexp.out_of_memory import says_exhausted
from bexp.workers.process.protocol import RankLost

OTHERS_SIGNALS = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)
"""Exit statuses of a process that somebody else has ended. A fault of its own ends it by other signals."""

KILLED_HINT = "if nobody ended it on purpose, the worker's host may have run out of memory: dmesg there says so"
"""Advice about a process that was killed for no known reason."""


def classify_exit(name: str, status: int, output: str, kernel_killed: bool) -> tuple[Outcome, str]:
    """Return the outcome of the trial that the process called `name` was running, and the reason in one line."""
    reason = f"{name} {describe_status(status)}"
    if status == -signal.SIGKILL and kernel_killed:
        return Outcome.OUT_OF_MEMORY, f"{reason}: the kernel's out-of-memory killer ended it"
    outcome = Outcome.OUT_OF_MEMORY if says_exhausted(output) else Outcome.CRASHED
    return outcome, f"{reason}: {output}" if output else reason


def is_unexplained(status: int, outcome: Outcome, output: str) -> bool:
    """Return whether a process was ended by a signal for no known reason, perhaps by somebody else.

    `outcome` is that of `classify_exit`. The kernel's out-of-memory killer sends SIGKILL, too, and is not always seen
    from a container.
    """
    return status in OTHERS_SIGNALS and outcome is Outcome.CRASHED and "cuda error" not in output.lower()


def describe_status(status: int) -> str:
    """Return an exit status in words. A negative one is the signal that ended the process."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def name_ended(status: int, lost: RankLost | None) -> tuple[str, int]:
    """Return the process that ended first, and its exit status: a lost rank, else the profiler process."""
    return ("the profiler process", status) if lost is None else (f"rank {lost.rank} ({lost.device})", lost.status)


def count_kernel_oom_kills() -> int:
    """Return how many processes the kernel's out-of-memory killer has ended since boot; 0 if that is not known."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
