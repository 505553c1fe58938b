"""Waiting: for what comes when it comes, and for what takes no time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PATIENCE_SECONDS = 500.0
"""How long tests wait for what should come soon. Only what hangs takes so long, however busy the host is."""


def wait_until(condition: Callable[[], object], what: str = "it has not happened") -> None:
    """Wait for a condition, asking ever more rarely; fail with `what` if it never comes true."""
    begin = time.monotonic()
    while not condition():
        waited = time.monotonic() - begin
        assert waited < PATIENCE_SECONDS, what
        time.sleep(min(0.01 + waited / 20, 0.1))


class Clock:
    """Stands for the module `time`, which passes only when somebody says so."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def perf_counter(self) -> float:
        return self.now

    monotonic = thread_time = perf_counter

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Waits(threading.Event):
    """An event that is waited for in no time, as often as `most` says before it is set."""

    def __init__(self, most: int = 100) -> None:
        super().__init__()
        self.seconds: list[float | None] = []
        self._most = most

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout)
        if len(self.seconds) == self._most:
            self.set()
        return self.is_set()
