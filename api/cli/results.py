"""The last output of a command about an exploration, and its exit code."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import typer

from bexp.api.certainty import describe_certainty
from bexp.api.cli.errors import ExitCode, say
from bexp.client.errors import ProblemError, ServiceError
from bexp.client.explorations import Exploration, Explorations, Result
from bexp.explorer.answers.lines import headline, render
from bexp.explorer.answers.text import WIDTH
from bexp.explorer.records.event import Event, EventCode

ANSWERED = {"recommendation", "answer", "text"}
MEASURED = {"target", "target_version", "target_class", "allocator"} | ANSWERED
"""The fields of a result with the measurements and what follows from them."""
GAP, INDENT = "  ", "    "
FEWEST_COLUMNS, MOST_COLUMNS = 60, 120


def conclude(client: Explorations, job_id: str, last: Event, *, as_json: bool, verbose: bool) -> ExitCode:
    """Print the answer of a job that has ended with the event `last`, in six lines unless `verbose`."""
    job = client.get(job_id)
    code = _exit_code(last)
    if as_json:
        print_json(document(client, job))
        return code
    if job.text is not None:
        typer.echo("\n" + render(job.text, terminal_width(), brief=not verbose and job.answer is not None))
    if code is not ExitCode.ANSWER and job.answer is None:
        say(f"bexp: {last.message}")
    return code


def say_best(client: Explorations, job_id: str) -> None:
    """Print the recommendation so far on stderr; nothing if the service does not answer."""
    with suppress(ProblemError, ServiceError):
        best = client.get(job_id).recommendation
        if best is None:
            say("nothing is recommended yet")
        else:
            say(f"best so far: {best.candidate.describe()}")
            say(f"  {headline(best)}")


def document(client: Explorations, job: Exploration) -> dict[str, Any]:
    """Return a job with its recommendation, answer, certainty, and reports of real runs, as JSON."""
    result, reports = Result.of(job), client.run_reports(job.id)
    about = {} if result is None else result.model_dump(mode="json", include=MEASURED)
    return {
        **dict.fromkeys(ANSWERED),
        **about,
        "job": job.model_dump(mode="json", exclude=ANSWERED),
        "certainty": describe_certainty(job, len(reports)),
        "run_reports": [report.model_dump(mode="json") for report in reports],
    }


def terminal_width() -> int:
    """Return the columns for text: those of the terminal, neither too few nor too many to read."""
    return min(MOST_COLUMNS, max(FEWEST_COLUMNS, shutil.get_terminal_size((WIDTH, 24)).columns))


def print_json(value: Any) -> None:
    """Print `value` for a program to read."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def print_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows in columns under their names, one row a line in a pipe."""
    width = shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else None
    for line in table_lines(head, rows, width):
        typer.echo(line)


def table_lines(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], width: int | None) -> Iterator[str]:
    """Yield the lines of a table. Columns beyond `width` continue on an indented line, and words stay whole."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    groups: list[list[int]] = [[]]
    for column, cell_width in enumerate(widths):
        taken = sum(widths[other] + len(GAP) for other in groups[-1]) + len(INDENT) * (len(groups) > 1)
        if width is not None and groups[-1] and taken + cell_width > width:
            groups.append([])
        groups[-1].append(column)
    for cells in (head, *rows):
        for number, group in enumerate(groups):
            text = GAP.join(f"{cells[column]:<{widths[column]}}" for column in group).rstrip()
            line = (INDENT if number else "") + text
            if width is None or len(line) <= width:
                yield line
            else:
                yield from textwrap.wrap(
                    line, width, subsequent_indent=2 * INDENT, break_long_words=False, break_on_hyphens=False
                )


def _exit_code(last: Event) -> ExitCode:
    if last.code is EventCode.SUCCEEDED:
        return ExitCode.ANSWER
    return ExitCode.SERVICE if last.code is EventCode.FAILED else ExitCode.NO_ANSWER
