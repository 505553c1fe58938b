"""Why a process ended by itself, as far as its exit status, its last words and the kernel tell."""

from __future__ import annotations

import signal
from pathlib import Path

from explorer.records.measurement import Outcome

OUT_OF_MEMORY_WORDS = ("bad_alloc", "cannot allocate memory", "can't allocate memory", "out of memory")


def autopsy(name: str, status: int, words: str, kernel_killed: bool) -> tuple[Outcome, str]:
    """The outcome of the trial that a process called `name` was running, and the reason in one line."""
    reason = f"{name} {describe_status(status)}"
    if status == -signal.SIGKILL and kernel_killed:
        return Outcome.OUT_OF_MEMORY, f"{reason}: the kernel's out-of-memory killer ended it"
    exhausted = any(word in words.lower() for word in OUT_OF_MEMORY_WORDS)
    outcome = Outcome.OUT_OF_MEMORY if exhausted else Outcome.CRASHED
    return outcome, f"{reason}: {words}" if words else reason


def describe_status(status: int) -> str:
    """An exit status (negative: the signal that ended the process) in words."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def count_kernel_oom_kills() -> int:
    """How often the kernel's OOM killer has struck on this host; 0 where that is not known."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
