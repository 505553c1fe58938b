"""Waiting that takes no time."""

from __future__ import annotations

import threading


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
