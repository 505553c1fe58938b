"""`bexp best`: the integer alone, an export, or everything as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from textwrap import indent
from typing import Annotated

import typer

from bexp.api.cli.arguments import AsJson, JobId, Verbose
from bexp.api.cli.connection import connect
from bexp.api.cli.errors import CommandError, ExitCode, say
from bexp.api.cli.job_ids import LATEST, MOST_SEARCHED, find_job
from bexp.api.cli.results import document, print_json, terminal_width
from bexp.client.explorations import Exploration, Explorations, Export
from bexp.explorer.answers.alternatives import no_dividing_text
from bexp.explorer.answers.lines import render, render_run_report
from bexp.explorer.answers.uses import is_provisional
from bexp.explorer.model.amounts import slower_text
from bexp.explorer.model.target import describe_target
from bexp.explorer.records.recommendation import Alternative, CandidateFigures, Recommendation, Role
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.trainers.registry import FORMATS, UnknownFormatError, find_format


def best(
    job_id: JobId,
    divides: Annotated[
        bool, typer.Option("--divides", metavar="", help="Print the best that divides the batch that was asked for.")
    ] = False,
    min_confidence: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, max=99, help="Exit with 1 if the confidence is lower than this."),
    ] = None,
    export_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help=f"Print a file for a training framework: {', '.join(FORMATS)}.",
        ),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option("--into", metavar="FILE", help="Print FILE, a YAML of that framework, with the export in it."),
    ] = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Print the best micro_batch_size so far, and the speed of real runs with it.

    -v prints the whole answer instead.

    Example: bexp best latest --divides --min-confidence 90

    Example: bexp best latest --format accelerate > accelerate.yaml

    Example: bexp best latest --format axolotl --into sft.yaml > tuned.yaml
    """
    _check_format(export_format, into, prints_all=as_json or verbose)
    with connect() as client:
        job = find_job(client, job_id)
        known = job.recommendation
        whole = as_json or verbose
        if whole:
            _print_whole(client, job, as_json=as_json)
        printed = as_json or export_format is not None
        reports = () if printed else client.run_reports(job.id)
        others = _answered_before(client) if known is None and job_id == LATEST else ()
        exported = client.export(job.id, export_format) if known is not None and export_format is not None else None
    if known is None:
        reason = _why_nothing(job)
        failed = job.state == "failed" and job.answer is None
        code = ExitCode.SERVICE if failed else ExitCode.NO_ANSWER
        raise CommandError(code, f"no recommendation: {reason}", *others)
    chosen: CandidateFigures | None = known.alternative(Role.DIVIDING) if divides else known
    if export_format is not None:  # an export keeps the batch
        chosen = known.for_batch
    if chosen is None:
        raise CommandError(ExitCode.NO_ANSWER, no_dividing_text(known, job.request))
    size, confidence = chosen.candidate.micro_batch_size, chosen.confidence or 0
    if min_confidence is not None and confidence < min_confidence:
        raise CommandError(
            ExitCode.NO_ANSWER,
            f"micro_batch_size {size} has confidence {confidence}, below --min-confidence {min_confidence}",
        )
    if exported is not None:
        _print_export(exported, export_format, into, job.request)
    elif not whole:
        typer.echo(size)
        parts = None if job.report is None else job.report.parts
        if job.request is not None and parts is not None and parts.target_version is not None:
            say(f"measured: {describe_target(job.request.target_name, parts.target_version, parts.class_name)}")
        if job.answered_from is not None:
            at = f"{job.answered_from.measured_at.astimezone():%Y-%m-%d %H:%M}"
            say(f"measured by exploration {job.answered_from.exploration}, {at}; `--fresh` measures again")
        for report in reports:
            say(render_run_report(report, known))
    for warning in () if exported is not None else _warnings(job, known, chosen):
        say(f"warning: {warning}")
    if not job.is_final:
        say(f"confidence {confidence} out of 100; the exploration is {job.state}")


def _print_whole(client: Explorations, job: Exploration, *, as_json: bool) -> None:
    if as_json:
        print_json(document(client, job))
    elif job.text is not None:
        typer.echo(render(job.text, terminal_width()))
        if job.notes:
            typer.echo(f"\nNotes\n{indent(job.notes, '  ')}")


def _print_export(
    exported: Export, export_format: str | None, into: Path | None, request: ExplorationRequest | None
) -> None:
    """Print an export, or the file `into` with its settings; notes for people go to stderr."""
    text, notes = exported.text, list(exported.notes)
    if into is not None and export_format is not None and request is not None:
        from bexp.api.cli.exported_into import exported_into  # noqa: PLC0415 - it reads files, which takes long to import

        text, comments = exported_into(into, find_format(export_format).trainer.name, text, request)
        notes = [*comments, *notes]
    typer.echo(text, nl=False)
    for note in notes:
        say(note)


def _check_format(name: str | None, into: Path | None, *, prints_all: bool) -> None:
    if into is not None:
        from bexp.api.cli.exported_into import check_into  # noqa: PLC0415 - likewise

        check_into(name)
    if name is None:
        return
    if prints_all:
        raise CommandError(ExitCode.USAGE, "--format prints a file: leave out --json and -v")
    try:
        find_format(name)
    except UnknownFormatError as error:
        raise CommandError(ExitCode.USAGE, f"--format {name}: {error}") from error


def _warnings(job: Exploration, known: Recommendation, chosen: CandidateFigures) -> Iterator[str]:
    """Yield the caveats that a script misses if it reads only the printed number."""
    other = known.alternative(Role.DIVIDING)
    if job.is_final and job.request is not None and is_provisional(chosen.confidence or 0, job.request):
        target = job.request.budget.confidence_target
        yield f"provisional: confidence {chosen.confidence} is below {target}, which was asked for"
    if isinstance(chosen, Alternative):
        if chosen.predicted:
            yield "predicted in part; an exploration with `--micro-batch-size auto` measures what divides the batch"
    elif known.nearest_batch_sizes and other is None:
        yield no_dividing_text(known, job.request)
    elif known.nearest_batch_sizes and other is not None:
        batch = "the batch" if job.request is None else f"batch_size {job.request.effective_batch_size}"
        yield (
            f"{known.candidate.micro_batch_size} does not divide {batch}; {other.candidate.micro_batch_size} does, "
            f"{slower_text(other.loss)}: `bexp best {job.id} --divides`"
        )


def _answered_before(client: Explorations) -> Sequence[str]:
    """Return a line that names the newest exploration with a recommendation; none if there is no such exploration."""
    searched = islice(client.list(), MOST_SEARCHED)
    other = next((job for job in searched if job.micro_batch_size is not None), None)
    if other is None:
        return ()
    about = ", ".join((other.model, *(f"{key}={value}" for key, value in other.labels.items())))
    return (f"the newest with one: `bexp best {other.id}` ({about})",)


def _why_nothing(job: Exploration) -> str:
    reason = job.error if job.answer is None else job.answer.variants[0].reason
    return reason or f"the exploration is {job.state}"
