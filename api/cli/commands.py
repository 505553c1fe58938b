"""The commands by name. A command's module is imported when it is used, so that each command starts at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from inspect import cleandoc
from types import FrameType
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

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


COMMANDS = {
    "explore": ("explore:explore", "Explore a model on this machine and print the best micro_batch_size."),
    "tune": (
        "tune:tune",
        "Find the best micro-batch size of a training command, by running a few steps of it at several sizes.",
    ),
    "check-accumulation": (
        "check_accumulation:check_accumulation",
        "Check that accumulation does not change the gradients of a training command.",
    ),
    "submit": (
        "submit:submit",
        "Submit a model to the workers of a service or a database, and print the id of the exploration.",
    ),
    "watch": ("jobs:watch", "Follow an exploration to its end and print its answer."),
    "resume": ("resume:resume", "Continue an exploration that was interrupted or cancelled, or that failed."),
    "best": ("best:best", "Print the best micro_batch_size so far, and the speed of real runs with it."),
    "compare": (
        "compare:compare",
        "Compare two explorations: how likely the second's answer is the faster one, and what differs.",
    ),
    "log": ("log:log", "Print the log of an exploration so far, a BEXP line for each event."),
    "list": ("jobs:list_", "List explorations, the newest first."),
    "report": (
        "report:report",
        "Write an exploration as one HTML file: the answer, the charts, the log and the trials.",
    ),
    "cancel": ("jobs:cancel", "End an exploration. `bexp resume` continues it."),
    "delete": ("deletion:delete", "Delete an exploration that has ended, with its log, trials, study and run reports."),
    "workers": ("workers:workers", "List the workers: their devices and versions, and what they do."),
    "serve": ("service:serve", "Serve the REST API."),
    "worker": ("service:worker", "Claim and run explorations until a signal ends the worker."),
    "mcp": ("mcp:mcp", "Serve tools for an agent over the Model Context Protocol."),
    "doctor": ("service:doctor", "Show which devices and back ends can be used here, and why the others cannot."),
    "study": (
        "administration:study",
        "Write the Optuna study of an exploration into the database, for optuna-dashboard and other Optuna tools.",
    ),
    "prune": (
        "administration:prune",
        "Delete finished explorations with their logs, trials, run reports and studies, old records of the audit, and "
        "measured components.",
    ),
    "audit": (
        "access:audit",
        "Show who submitted, cancelled, resumed, deleted or annotated what, and who changed tokens and quotas.",
    ),
    "token": ("access:token_commands", "Create, list and revoke the bearer tokens of the service."),
    "quota": ("access:quota_commands", "Set and list the quotas of owners."),
    "db": ("administration:database_commands", "Maintain the database."),
}
"""The place of each command or group below `bexp.api.cli`, and its line in the list of commands."""


class CommandGroup(GuardedGroup):
    """The commands of `bexp`. Each is a name with its summary until it is used."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands.update({name: TyperCommand(name, help=summary) for name, (_, summary) in COMMANDS.items()})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the arguments name, and load it."""
        if args and args[0] in COMMANDS:
            self.commands[args[0]] = load_command(args[0])
        return super().resolve_command(ctx, args)


def load_command(name: str) -> Any:
    """Import a command, or a group of commands, with its options."""
    place, summary = COMMANDS[name]
    module, _, member = place.partition(":")
    command = getattr(import_module(f"bexp.api.cli.{module}"), member)
    if isinstance(command, typer.Typer):
        group = typer.main.get_group(command)
        group.name, group.help = name, summary
        return group
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    # typer would keep the line breaks of the source, which do not suit the terminal's width.
    paragraphs = cleandoc(command.__doc__ or "").split("\n\n")
    alone.command(name, help="\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs))(command)
    return typer.main.get_command(alone)
