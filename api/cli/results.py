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
from pydantic import BaseModel

from bexp.api.certainty import describe_certainty
from bexp.api.cli.errors import ExitCode, say
from bexp.client.errors import ProblemError, ServiceError
from bexp.client.explorations import Exploration, Explorations, Result
from bexp.explorer.answers.answer import is_provisional, render_answer, render_recommendation
from bexp.explorer.answers.summary import render_summary, surer_text
from bexp.explorer.answers.text import WIDTH, row, wrap
from bexp.explorer.model.amounts import rate_text
from bexp.explorer.model.target import BEXP, TRANSFORMERS
from bexp.explorer.records.event import Event, EventCode
from bexp.explorer.records.recommendation import Answer, Recommendation
from bexp.explorer.search.trainer_terms import own_formats

MEASURED = {"target", "target_version", "target_class", "allocator"}
"""The fields of a result that say what was measured."""
GAP, INDENT = "  ", "    "
FEWEST_COLUMNS, MOST_COLUMNS = 60, 120


def conclude(client: Explorations, job_id: str, last: Event, *, as_json: bool, verbose: bool) -> ExitCode:
    """Print the answer of a job that has ended with the event `last`, in six lines unless `verbose`."""
    job = client.get(job_id)
    code = _exit_code(last)
    if as_json:
        print_json(document(client, job))
        return code
    result = client.result(job_id)
    if result is not None and (text := answer_text(job, result, verbose=verbose)):
        typer.echo("\n" + text)
    if code is not ExitCode.ANSWER and (result is None or result.answer is None):
        say(f"bexp: {last.message}")
    return code


def answer_text(job: Exploration, result: Result, *, verbose: bool) -> str:
    """Return the answer of a job in six lines, or all that is known of it; empty if nothing is known.

    Of an exploration that has ended early the best until then is told whole.
    """
    answer, best, width = result.answer, result.recommendation, terminal_width()
    if answer is None:
        if best is None:
            return ""
        lines = render_recommendation(best, job.request, result.measured, width, job.device_name)
        return "\n".join(["Ended early. The best until then:", *lines])
    if not verbose:
        return render_summary(answer, job.id, job.request, width, job.device_name)
    whole = render_answer(answer, job.request, result.measured, width, job.device_name)
    return whole if best is None else "\n".join([whole, "", *wrap(usage_rows(job, answer, best), width)])


def say_best(client: Explorations, job_id: str) -> None:
    """Say what is recommended so far; nothing if the service does not answer."""
    with suppress(ProblemError, ServiceError):
        result = client.result(job_id)
        best = None if result is None else result.recommendation
        if best is None:
            say("nothing is recommended yet")
        else:
            rate = rate_text(best.expected_tokens_per_second)
            gain = best.ratio_text(best.performance)
            say(f"best so far: {best.candidate.describe()}")
            say(f"  {rate} per device, {gain} base, confidence {best.confidence} out of 100")


def usage_rows(job: Exploration, answer: Answer, best: Recommendation) -> list[str]:
    """Return the commands that use an answer, and how to get a surer one if it is provisional."""
    job_id, request, surer = job.id, job.request, []
    if request is not None and is_provisional(best.confidence, request):
        surer = [row("to be surer", surer_text(best, request, answer.serves_up_to))]
    names = own_formats(best, request)
    named = f"bexp best {job_id} --format {names[0] if len(names) == 1 else 'NAME'}"
    named += f", where NAME is one of {', '.join(names)}" if len(names) > 1 else ""
    has_mesh = best.plan is not None and not best.plan.mesh.is_data_parallel
    is_own_code = request is not None and request.target_name not in (BEXP, TRANSFORMERS)
    return [
        *surer,
        *([row("for a trainer", named)] if names else []),
        *([] if has_mesh or is_own_code else [row("for bexp.apply", f"bexp best {job_id} --json > best.json")]),
        row("as a page", f"bexp report {job_id} --out report.html"),
    ]


def document(client: Explorations, job: Exploration) -> dict[str, Any]:
    """Return a job with its recommendation, its answer, its certainty, and what real runs reached, as JSON."""
    result, reports = client.result(job.id), client.run_reports(job.id)
    best, answer = (None, None) if result is None else (result.recommendation, result.answer)
    return {
        **({} if result is None else result.model_dump(include=MEASURED)),
        "job": job.model_dump(mode="json", exclude={"recommendation", "answer"}),
        "recommendation": _dump(best),
        "certainty": describe_certainty(job, result, len(reports)),
        "answer": _dump(answer),
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


def _dump(part: BaseModel | None) -> dict[str, Any] | None:
    return None if part is None else part.model_dump(mode="json")


def _exit_code(last: Event) -> ExitCode:
    if last.code is EventCode.SUCCEEDED:
        return ExitCode.ANSWER
    return ExitCode.SERVICE if last.code is EventCode.FAILED else ExitCode.NO_ANSWER
