"""How a command ends: exit codes, and messages for known failures."""

from __future__ import annotations

import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType
from typing import Any

import typer
from typer.core import TyperGroup

from api.text import wrap


class ExitCode(IntEnum):
    """The exit statuses of a command."""

    ANSWER = 0
    NO_ANSWER = 1  # nothing fits, the exploration was cancelled, or nothing is known yet
    USAGE = 2  # the command line, the configuration, the id or the token is wrong
    SERVICE = 3  # the service or its worker cannot be reached, or failed


class CommandError(Exception):
    """Ends a command with `code` after printing `lines` on stderr."""

    def __init__(self, code: ExitCode, *lines: str) -> None:
        self.code = code
        self.lines = lines
        super().__init__("\n".join(lines))


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
            except Exception as error:
                from api.cli.failures import describe_failure  # noqa: PLC0415 - few commands fail; its imports take long

                if (failure := describe_failure(error)) is None:
                    raise
                _fail(failure.code, *failure.lines)


def say(text: str) -> None:
    """Print lines to stderr, because stdout holds the result alone. On a terminal they break between words."""
    if sys.stderr.isatty():
        text = "\n".join(wrap(text.split("\n"), shutil.get_terminal_size().columns, indent=4))
    sys.stderr.write(f"{text}\n")  # rich replaces this stream while it draws, so that the line comes above the drawing
    sys.stderr.flush()


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
