"""Other processes on a GPU, as far as this process can tell."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from bexp.measure.nvml import Gpu

APPEARED_BYTES = 256 << 20
"""If memory outside our allocator grows by more than this during a timing, another process took it.

A CUDA context takes more than this; our own kernels and libraries, once warm, take nothing more.
"""
OWN_GROWTH_BYTES = 2 << 30
"""The most that our own modules and kernels may take outside the allocator between two timings."""


@dataclass(frozen=True, slots=True)
class ForeignProcesses:
    """The other processes that came to the device since the job began, and what they take of it."""

    processes: int = 0
    held_bytes: int = 0
    busy_share: float | None = None
    """Their share (0..1) of the device's time; None if it is not known."""

    def __bool__(self) -> bool:
        return self.processes > 0 or self.held_bytes > 0


class GpuProcessMonitor:
    """A watch for processes that come to the device while a job runs.

    A container may hide the processes of another container. So the monitor looks at process ids that are new since the
    job began, and at memory in use outside this process's allocator. That memory also contains the runtime's context,
    loaded kernels, and the memory of earlier processes, whose size is known at the beginning. The time and the size of
    a growth distinguish a new process from kernels that this process loads later.

    Args:
        gpu: the device.
        reserved_bytes: what this process's allocator holds.
        used_before: bytes in use before this process had a context.
        processes_before: the processes that had one before.
    """

    def __init__(
        self,
        gpu: Gpu,
        reserved_bytes: Callable[[], int],
        used_before: int | None,
        processes_before: frozenset[int] | None,
    ) -> None:
        self._gpu = gpu
        self._reserved_bytes = reserved_bytes
        self._used_before = used_before
        level = self._level()
        self._context = None if level is None or used_before is None else max(0, level - used_before)
        self._known = gpu.processes() or frozenset()
        came = self._known - (processes_before or frozenset())
        self._own = came if processes_before is not None and len(came) == 1 else frozenset[int]()
        self._accounted = level
        self._grown = 0
        self._since = 0

    def begin(self, others_bytes: int | None) -> int | None:
        """Begin a job, and return the bytes that others hold now; None if unknown.

        A profiler process that replaces another within a job passes on the other's result as `others_bytes`. Processes
        that came since then count as foreign.
        """
        level = self._level()
        self._known, self._accounted, self._grown = self._gpu.processes() or frozenset(), level, 0
        if level is None or self._context is None:
            return None
        if others_bytes is None:
            return max(0, level - self._context)
        assert self._used_before is not None
        if self._used_before - others_bytes > APPEARED_BYTES:
            self._grown = self._used_before - others_bytes
            self._accounted = level - self._grown
        return others_bytes

    def start(self) -> None:
        """Call this when a timing starts: memory that grew since the last timing may be our own."""
        self._since = int(time.time() * 1e6)
        self._look(tolerated=OWN_GROWTH_BYTES)
        level = self._level()
        if not self._grown and level is not None:
            self._accounted = level

    def look(self) -> None:
        """Call this during a timing: memory that grows now belongs to another process."""
        self._look(tolerated=APPEARED_BYTES)

    def find(self) -> ForeignProcesses:
        """Return the other processes that came, and their share of the device's time since `start`."""
        self.look()
        present = self._gpu.processes() or frozenset()
        came = present - self._known - self._own
        if came:
            came -= {child.pid for child in psutil.Process().children(recursive=True)}
        shares = self._gpu.busy_shares(self._since) if self._own and self._since else None
        others = present - self._own  # drivers also list processes that have ended
        foreign = None if shares is None else min(1.0, sum(shares.get(pid, 0.0) for pid in others))
        return ForeignProcesses(len(came), self._grown, foreign)

    def _look(self, *, tolerated: int) -> None:
        """Detect other processes by memory: one came if it grew too much, and left if most of that is free again."""
        level = self._level()
        if level is None or self._accounted is None:
            return
        excess = level - self._accounted
        if not self._grown:
            self._grown = excess if excess > tolerated else 0
        elif excess <= APPEARED_BYTES or (excess <= OWN_GROWTH_BYTES and excess <= self._grown - APPEARED_BYTES):
            self._grown, self._accounted = 0, level
        else:
            self._grown = max(self._grown, excess)

    def _level(self) -> int | None:
        """Bytes in use that are not in our allocator."""
        used = self._gpu.used_bytes()
        return None if used is None else used - self._reserved_bytes()
