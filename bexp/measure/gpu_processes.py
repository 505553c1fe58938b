"""Other processes on a GPU, as far as they can be told from this one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from bexp.measure.nvml import Gpu

APPEARED_BYTES = 256 << 20
"""Growth of memory that is not ours, within a timing, from which on somebody else took it.

Less than a context takes; once warm, our own kernels and libraries take no more memory.
"""
OWN_GROWTH_BYTES = 2 << 30
"""What our own modules, and local memory of kernels, may take between two timings, outside of the allocator."""


@dataclass(frozen=True, slots=True)
class ForeignProcesses:
    """What others have of the device that they had not when the job began; the share of its time null if unknown."""

    processes: int = 0
    held_bytes: int = 0
    busy_share: float | None = None

    def __bool__(self) -> bool:
        return self.processes > 0 or self.held_bytes > 0


class GpuProcessMonitor:
    """Notices processes that come while a job runs.

    By two ways, since a container need not show the processes of another: by process ids that were not there when the
    job began, and by memory that is in use beyond what the allocator holds. Of that the runtime's context, loaded
    kernels and whoever was there before are known at the beginning; kernels that are loaded later are told from a
    foreign_process by when and by how much the memory grows.

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
        """A job begins; returns what others hold now, null if unknown.

        A process that replaces another within a job is given what that one returned: whoever came since is a foreign_process.
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
        """A timing starts: what grew since the last one may be our own."""
        self._since = int(time.time() * 1e6)
        self._look(tolerated=OWN_GROWTH_BYTES)
        level = self._level()
        if not self._grown and level is not None:
            self._accounted = level

    def look(self) -> None:
        """Within a timing: what grows now is a foreign_process's."""
        self._look(tolerated=APPEARED_BYTES)

    def find(self) -> ForeignProcesses:
        """Who came, as of now; their share of the device's time since `start`."""
        self.look()
        present = self._gpu.processes() or frozenset()
        came = present - self._known - self._own
        if came:
            came -= {child.pid for child in psutil.Process().children(recursive=True)}
        shares = self._gpu.busy_shares(self._since) if self._own and self._since else None
        others = present - self._own  # drivers also tell of processes that are gone
        foreign = None if shares is None else min(1.0, sum(shares.get(pid, 0.0) for pid in others))
        return ForeignProcesses(len(came), self._grown, foreign)

    def _look(self, *, tolerated: int) -> None:
        """Follow the memory of foreign_processes: one was there if too much grew, and is gone when most of it is free again."""
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
