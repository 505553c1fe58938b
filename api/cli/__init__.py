"""The command line: `bexp`."""

from __future__ import annotations

import sys
import tempfile
import traceback
from importlib import metadata
from typing import Annotated

import typer

from bexp.api.cli.commands import CommandGroup
from bexp.api.cli.errors import ExitCode, say

app = typer.Typer(
    name="bexp",
    cls=CommandGroup,
    epilog=(
        "Exit codes: 0 there is an answer, 1 there is none (nothing fits, or cancelled), 2 wrong usage, "
        "3 the service failed. Environment: BEXP_DATABASE_URL (where explorations are stored; default: a file), "
        "BEXP_API_URL (the service that commands talk to; default: on this machine), BEXP_API_TOKEN (its token)."
    ),
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(metadata.version("bexp"))
        raise typer.Exit


@app.callback()
def group_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Find the best micro_batch_size, measured on real kernels."""


def main() -> None:
    """Run the command line."""
    try:
        app(prog_name="bexp")
    except Exception as error:  # noqa: BLE001 - a defect: the user gets a line, the developers get the traceback
        with tempfile.NamedTemporaryFile("w", prefix="bexp-", suffix=".traceback", delete=False) as file:
            traceback.print_exc(file=file)
        say(f"bexp: unexpected {type(error).__name__}: {error}")
        say(f"  this is a defect of bexp; {file.name} holds the traceback for its developers")
        sys.exit(ExitCode.SERVICE)
