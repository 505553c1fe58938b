"""Runs work in a process of its own, so that an illegal access or a hang costs one contender and not the benchmark."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

_CONTEXT = multiprocessing.get_context("spawn")
_END_SECONDS = 10.0

Send = Callable[[Any], None]


class LostError(Exception):
    """The process ended, or sent nothing for too long; the message says which."""


def messages(function: Callable[..., None], *arguments: Any, silence_seconds: float) -> Generator[Any, None, None]:
    """Yield what `function(send, *arguments)` sends from a process of its own, until it returns.

    Functions must be importable by name, arguments and messages picklable. LostError ends the iteration where the
    process ended by itself, or was ended because it sent nothing for `silence_seconds`.
    """
    near, far = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_run, args=(far, function, arguments), daemon=True)
    process.start()
    far.close()
    try:
        while True:
            if not near.poll(silence_seconds):
                raise LostError(f"nothing within {silence_seconds:g} s")
            try:
                kind, value = near.recv()
            except EOFError:
                process.join(_END_SECONDS)
                raise LostError(f"the process ended with status {process.exitcode}") from None
            if kind == "done":
                return
            yield value
    finally:
        near.close()
        process.join(0.5)
        if process.is_alive():
            process.kill()
            process.join(_END_SECONDS)


def _run(connection: Connection, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    def send(value: Any) -> None:
        connection.send(("message", value))

    function(send, *arguments)
    connection.send(("done", None))
    with suppress(BrokenPipeError):  # the other side need not listen any more
        connection.close()
    time.sleep(0)
