"""The background work of the service: each task is restarted when it fails, and its health can be asked for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

RESTART_SECONDS = 1.0
SILENCE_SECONDS = 10.0
"""A task counts as stuck if it has finished no round for its interval and this time."""

Beat = Callable[[], None]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Task:
    name: str
    interval_seconds: float
    last_round: float = field(default_factory=time.monotonic)
    fault: str | None = None

    def beat(self) -> None:
        self.last_round = time.monotonic()
        self.fault = None


class Supervisor:
    """Runs tasks until it is closed. A task gets a function to call after each successful round."""

    def __init__(self, *, restart_seconds: float = RESTART_SECONDS) -> None:
        self._restart_seconds = restart_seconds
        self._tasks: list[_Task] = []
        self._running: list[asyncio.Task[None]] = []

    def start(self, name: str, run: Callable[[Beat], Awaitable[None]], *, interval_seconds: float) -> None:
        """Run `run` from now on; it should finish a round every `interval_seconds`."""
        task = _Task(name, interval_seconds)
        self._tasks.append(task)
        self._running.append(asyncio.create_task(self._keep_running(task, run)))

    def find_trouble(self) -> str | None:
        """Return the trouble of the first task that does not do its work, or None if all do."""
        now = time.monotonic()
        for task in self._tasks:
            if task.fault is not None:
                return f"the background task '{task.name}' failed: {task.fault}"
            silence = now - task.last_round
            if silence > task.interval_seconds + SILENCE_SECONDS:
                return f"the background task '{task.name}' has not finished a round for {silence:.0f} s"
        return None

    async def close(self) -> None:
        """End all tasks."""
        for running in self._running:
            running.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _keep_running(self, task: _Task, run: Callable[[Beat], Awaitable[None]]) -> None:
        while True:
            try:
                await run(task.beat)
                task.fault = "it ended"
            except Exception as error:  # whatever ends a task, it is started again
                task.fault = type(error).__name__
                logger.warning("the background task '%s' failed and is started again", task.name, exc_info=error)
            await asyncio.sleep(self._restart_seconds)
