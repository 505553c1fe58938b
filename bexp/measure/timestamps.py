"""Moments on a device or on the host, and the seconds between them, also where other processes want its cores.

Where others share a core, the wall clock counts their time as well, and threads wait longer for each other. The kernel
says how long threads were ready and got no core (`schedstat`). Where that is much, the CPU time of the thread that runs
the operations is taken instead. Its share of each operation is as large as any thread's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

CALM_SHARE = 0.02
"""Threads may wait for a core for this share of a time, added up over all of them, before it counts as shared."""
TASKS = Path("/proc/self/task")
NANOSECOND = 1e-9


class HostMark:
    """The present moment on the host.

    Args:
        alone: whether this thread waits for no other process. Such a wait is part of a step, but not of the CPU time.
    """

    __slots__ = ("_from", "_to", "_waited")

    def __init__(self, *, alone: bool = True) -> None:
        self._to = _clocks()
        self._waited = waited_seconds() if alone else 0.0
        self._from = _clocks()  # the reading itself belongs to no interval

    def seconds_until(self, later: HostMark) -> float:
        """Seconds from this mark to `later`, both made by this thread."""
        wall, processor = (end - start for start, end in zip(self._from, later._to, strict=True))
        return processor if later._waited - self._waited > CALM_SHARE * wall else wall


class CoreWatch:
    """The time that this process's threads waited for a core between `start` and `stop`, added up."""

    def __init__(self) -> None:
        self._elapsed = self._waited = 0.0
        self._started = (0.0, 0.0)

    def start(self) -> None:
        """Begin an interval."""
        self._started = (time.perf_counter(), waited_seconds())

    def stop(self) -> None:
        """End the interval."""
        started, waited = self._started
        self._waited += waited_seconds() - waited
        self._elapsed += time.perf_counter() - started

    @property
    def wait_share(self) -> float | None:
        """The share of the time that threads waited, added up over them and at most 1; None without any interval."""
        return min(1.0, max(0.0, self._waited / self._elapsed)) if self._elapsed else None


def waited_seconds() -> float:
    """Return how long this process's threads have been ready to run without a core; 0 if the kernel does not say."""
    nanoseconds = 0
    with contextlib.suppress(OSError):
        for task in TASKS.iterdir():
            with contextlib.suppress(OSError, IndexError):  # the thread has ended, or the kernel does not count
                nanoseconds += int((task / "schedstat").read_bytes().split()[1])
    return nanoseconds * NANOSECOND


def _clocks() -> tuple[float, float]:
    """The wall clock's seconds and those of this thread."""
    return time.perf_counter(), time.thread_time()


class Mark(Protocol):
    """A moment on the device."""

    def seconds_until(self, later: Any) -> float:
        """Seconds from this moment to `later`, of the same kind; on CUDA the device must have reached both."""


class CudaMark:
    """The moment at which the current stream gets to this point."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def seconds_until(self, later: CudaMark) -> float:
        """Seconds from this mark to `later`."""
        return float(self._event.elapsed_time(later._event)) / 1e3


def synchronize(device: torch.device) -> None:
    """Wait for a CUDA device; the CPU has done its work already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def mark_of(device: torch.device, *, alone: bool = True) -> Callable[[], Mark]:
    """Return the maker of marks on `device`; `alone` is false where processes wait for each other."""
    return CudaMark if device.type == "cuda" else partial(HostMark, alone=alone)
