"""`bexp compare`: the faster of two answers, and the certainty of that."""

from __future__ import annotations

from typing import Annotated

import typer

from bexp.api.cli.arguments import AsJson
from bexp.api.cli.connection import connect
from bexp.api.cli.results import print_json, terminal_width
from bexp.explorer.answers.text import wrap

Side = Annotated[str, typer.Argument(metavar="ID", help="An exploration; ID,ID adds further runs of its answer.")]


def compare(a: Side, b: Side, as_json: AsJson = False) -> None:
    """Compare two explorations: how likely the second's answer is the faster one, and what differs.

    Example: bexp compare 95a8 latest
    """
    from bexp.api.comparison import compare_answers  # noqa: PLC0415 - SciPy takes long to import

    with connect() as client:
        compared = compare_answers(client, a, b)
    if as_json:
        print_json(compared.document)
    else:
        typer.echo("\n".join(wrap(compared.lines, terminal_width())))
