"""Runs calls in a process of its own, so that a crash or a hang costs one call and not the benchmark."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Any, Self

_CONTEXT = multiprocessing.get_context("spawn")
_END_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Lost:
    """A call without a result: the process ended in it, or was ended because it took too long."""

    timed_out: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Spoilt:
    """Returned by a called function: its value, and the sign that the process must not be used again."""

    value: Any


class Isolated:
    """A process that calls functions one after the other, replaced when one of them takes it down.

    Functions must be importable by name, arguments and results picklable. What a function raises is raised here.
    """

    def __init__(self) -> None:
        self.restarts = -1
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def call(self, function: Callable[..., Any], *arguments: Any, seconds: float) -> Any:
        """The function's value, or `Lost`; `seconds` include starting the process if there is none."""
        connection = self._running()
        deadline = time.monotonic() + seconds
        try:
            connection.send((function, arguments))
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                self.close()
                return Lost(True, f"no result within {seconds:g} s")
            succeeded, value = connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return Lost(False, f"the process ended with status {self.close()}")
        if not succeeded:
            raise value
        if isinstance(value, Spoilt):
            self.close()
            return value.value
        return value

    def close(self) -> int | None:
        """End the process; its exit status."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if connection is not None:
            connection.close()  # the process ends when it next reads
        if process is None:
            return None
        process.join(1.0)
        if process.is_alive():
            process.kill()
            process.join(_END_SECONDS)
        return process.exitcode

    def _running(self) -> Connection:
        if self._process is None or self._connection is None or not self._process.is_alive():
            self.close()
            self._connection, far = _CONTEXT.Pipe()
            self._process = _CONTEXT.Process(target=_serve, args=(far,), daemon=True)
            self._process.start()
            far.close()
            self.restarts += 1
        return self._connection


def _serve(connection: Connection) -> None:
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        if not gc.get_freeze_count():
            gc.freeze()  # objects made by imports live as long as the process, so garbage collections can skip them
        try:
            answer = (True, function(*arguments))
        except Exception as error:  # noqa: BLE001 - raised again where the call was made
            answer = (False, error)
        connection.send(answer)
