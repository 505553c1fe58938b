"""The group of commands, which turns known failures and signals into lines on stderr and an exit code."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import typer
from typer.core import TyperGroup

from bexp.api.cli.errors import CommandError, ExitCode, say


class TerminatedError(BaseException):
    """A signal has ended the command; the `with` blocks that it leaves end what it has started."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(number)


class GuardedGroup(TyperGroup):
    """A group of commands whose known failures are lines on stderr and an exit code, never a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the arguments name."""
        with _signals_raise():
            try:
                return super().invoke(ctx)
            except typer.BadParameter as error:
                error.message = error.message.removeprefix("Value error, ")  # pydantic's prefix says nothing here
                raise
            except CommandError as error:
                _fail(error.code, *error.lines)
            except BrokenPipeError:  # typer ends the command quietly
                raise
            except OSError as error:
                _fail(
                    ExitCode.SERVICE, f"{error.strerror or error}: {error.filename}" if error.filename else str(error)
                )
            except KeyboardInterrupt:
                raise typer.Exit(128 + signal.SIGINT) from None
            except TerminatedError as error:
                raise typer.Exit(128 + error.number) from None
            except typer.Exit:
                raise
            except Exception as error:  # `describe_failure` knows the kinds, and the rest is raised again
                from bexp.api.cli.failures import describe_failure  # noqa: PLC0415 - few commands fail; its imports take long

                if (failure := describe_failure(error)) is None:
                    raise
                _fail(failure.code, *failure.lines)


def _fail(code: ExitCode, first: str, *rest: str) -> None:
    say(f"bexp: {first}")
    for line in rest:
        say(f"  {line}")
    raise typer.Exit(code) from None


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise, as SIGINT does, so that every `with` block is left."""

    def raise_(number: int, _frame: FrameType | None) -> None:
        raise TerminatedError(number)

    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # only the main thread can handle signals
    before = {number: signal.signal(number, raise_) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
