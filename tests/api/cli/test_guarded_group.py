"""What a command's end means: each known failure has its lines on stderr and its exit status, and so has a signal."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import typer
from typer.testing import CliRunner

from bexp.api.cli.commands import GuardedGroup, TerminatedError
from bexp.api.cli.errors import CommandError, ExitCode


def run(raised: BaseException | int) -> tuple[int, str]:
    """The exit status and the errors of a command that raises this, or is sent this signal."""
    app = typer.Typer(cls=GuardedGroup)
    app.callback()(lambda: None)

    @app.command()
    def act() -> None:
        if isinstance(raised, BaseException):
            raise raised
        os.kill(os.getpid(), raised)

    done = CliRunner().invoke(app, ["act"])
    return done.exit_code, done.stderr


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (CommandError(ExitCode.NO_ANSWER, "nothing fits", "ask again"), 1, "bexp: nothing fits\n  ask again\n"),
        (CommandError(ExitCode.USAGE, "no such id"), 2, "bexp: no such id\n"),
        (CommandError(ExitCode.SERVICE, "it is away"), 3, "bexp: it is away\n"),
        (FileNotFoundError(2, "No such file", "a.yaml"), 3, "bexp: No such file: a.yaml\n"),
        (OSError(28, "No space left"), 3, "bexp: [Errno 28] No space left\n"),
        (OSError("no strerror"), 3, "bexp: no strerror\n"),
        (KeyboardInterrupt(), 130, ""),
        (TerminatedError(15), 143, ""),
        (typer.Exit(7), 7, ""),
    ],
    ids=str,
)
def test_each_failure_has_its_lines_and_its_status(raised: BaseException, status: int, said: str) -> None:
    assert run(raised) == (status, said)


@pytest.fixture(params=[signal.SIG_DFL, signal.SIG_IGN])
def hangup(request: pytest.FixtureRequest) -> Iterator[signal.Handlers]:
    before = signal.signal(signal.SIGHUP, request.param)
    yield request.param
    assert signal.signal(signal.SIGHUP, before) is request.param, "the handler from before is back"


def test_a_signal_ends_the_command_unless_it_was_ignored(hangup: signal.Handlers) -> None:
    """As by `nohup`: a terminal that is closed does not end the command."""
    before = signal.getsignal(signal.SIGTERM)
    assert run(signal.SIGHUP) == ((0, "") if hangup is signal.SIG_IGN else (129, ""))
    assert run(signal.SIGTERM) == (143, "")
    assert signal.getsignal(signal.SIGTERM) is before
