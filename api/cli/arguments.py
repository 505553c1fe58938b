"""Arguments and options of several commands. This module is light, so that a command starts at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bexp.api.cli.errors import CommandError, ExitCode
from bexp.explorer.request.labels import parse_label

JobId = Annotated[
    str,
    typer.Argument(metavar="ID", help="The id of the exploration, its first characters (four or more), or `latest`."),
]
Command = Annotated[
    list[str], typer.Argument(metavar="-- COMMAND ...", help="The command that trains, as you would start it.")
]
LogDir = Annotated[
    Path | None,
    typer.Option("--log-dir", metavar="DIR", help="Keep the log below DIR.", rich_help_panel="Output"),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose", "-v", metavar="", help="Print the whole answer, not six lines of it.", rich_help_panel="Output"
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", metavar="", help="Print everything as JSON on stdout.", rich_help_panel="Output")
]


def parse_labels(given: list[str] | None) -> dict[str, str] | None:
    """Return the labels of a request from `--label`; None without any.

    Raises CommandError if a text is no label.
    """
    if not given:
        return None
    try:
        return dict(parse_label(text) for text in given)
    except ValueError as error:
        raise CommandError(ExitCode.USAGE, f"--label: {error}") from None
