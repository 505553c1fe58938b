"""The order in which the threads of one process write."""

from __future__ import annotations

import threading
from collections import deque


class WriterTurns:
    """A lock that its waiters get in the order in which they asked for it.

    `threading.Lock` keeps no order: the thread that has just released it may take it again before the others wake up,
    so that one of eight waiters may wait four times as long as most.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._is_taken = False
        self._waiting: deque[threading.Lock] = deque()

    @property
    def num_waiting(self) -> int:
        """How many threads wait for their turn."""
        return len(self._waiting)

    def acquire(self, timeout_seconds: float) -> bool:
        """Wait for a turn; return whether it came in time."""
        with self._guard:
            if not self._is_taken:
                self._is_taken = True
                return True
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        if mine.acquire(timeout=timeout_seconds):
            return True
        with self._guard:
            if mine in self._waiting:
                self._waiting.remove(mine)
                return False
        return True  # the turn came between the end of the wait and this look

    def release(self) -> None:
        """Hand the turn to whoever has waited longest."""
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_taken = False
