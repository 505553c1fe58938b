"""`bexp submit`, `watch`, `best`, `list` and `cancel`: explorations on a service."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from api.answer import is_provisional, render_run_report
from api.answer_choices import no_dividing_text
from api.cli import options
from api.cli.connection import connect, connect_or_embed
from api.cli.errors import CommandError, ExitCode, say
from api.cli.following import follow
from api.cli.job_ids import find_job
from api.cli.results import conclude, document, print_json, print_table, say_best
from api.client import Client, Job, JobState, Result
from api.text import slower_text
from explorer.exports.exploration import UnknownFormatError
from explorer.exports.registry import FORMATS, find_format
from explorer.records.recommendation import DividingCandidate, Recommendation

JobId = Annotated[
    str, typer.Argument(metavar="ID", help="The id of the exploration, its first characters, or `latest`.")
]


def submit(
    config: options.Config,
    device: Annotated[
        str | None, typer.Option(metavar="cpu|cuda", help="The kind of device to explore on.", show_default="any")
    ] = None,
    micro_batch_size: options.MicroBatchSize = None,
    batch_size: options.BatchSize = None,
    num_devices: options.NumDevices = None,
    seq_length: options.SeqLength = None,
    memory_limit_gib: options.MemoryLimitGiB = None,
    headroom: options.Headroom = None,
    prefer: options.PreferOption = None,
    mode: options.ModeOption = None,
    execution: options.ExecutionOption = None,
    target: options.TargetOption = None,
    max_seconds: options.MaxSeconds = None,
    max_trials: options.MaxTrials = None,
    confidence_target: options.ConfidenceTarget = None,
    seed: options.Seed = None,
    labels: options.Label = None,
    fresh: options.Fresh = False,
    fields: options.Set = None,
    priority: Annotated[
        int, typer.Option(min=-100, max=100, help="Among the explorations of its owner, the highest is next.")
    ] = 0,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the exploration to its end.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Submit a model to the service and print the id of the exploration.

    Example: id=$(bexp submit config.json --device cuda --seq-length 4096)
    """
    request = options.read_request(
        config,
        {
            "device_kind": options.device_kind(device),
            "micro_batch_size": options.parse_micro_batch_size(micro_batch_size),
            "batch_size": batch_size,
            "num_devices": num_devices,
            "seq_length": seq_length,
            "memory_limit_gib": memory_limit_gib,
            "headroom": headroom,
            "prefer": prefer,
            "mode": mode,
            "execution": execution,
            "target": target,
            "max_seconds": max_seconds,
            "max_trials": max_trials,
            "confidence_target": confidence_target,
            "seed": seed,
            "labels": options.parse_labels(labels),
            "fresh": fresh or None,
            **options.parse_fields(fields),
        },
    )
    with connect() as client:
        job = client.submit(request, priority=priority)
        for notice in request.notices if not watch else ():
            say(notice)
        if watch:
            say(f"exploration {job.id}")
            raise typer.Exit(follow_job(client, job, as_json=as_json))
    if as_json:
        print_json(job.model_dump(mode="json"))
    else:
        typer.echo(job.id)


def watch(job_id: JobId, as_json: options.AsJson = False) -> None:
    """Follow an exploration to its end and print its answer.

    Example: bexp watch latest
    """
    with connect_or_embed() as client:
        raise typer.Exit(follow_job(client, find_job(client, job_id), as_json=as_json))


def best(
    job_id: JobId,
    divides: Annotated[
        bool, typer.Option("--divides", help="Print the best that divides the batch that was asked for.")
    ] = False,
    min_confidence: Annotated[
        int | None, typer.Option(min=0, max=99, help="Exit with 1 if the confidence is lower than this.")
    ] = None,
    export_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help=f"Print a file for a training framework: {', '.join(FORMATS)}.",
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Print the best micro_batch_size so far, and what real runs with it have reached.

    Example: bexp best latest --divides --min-confidence 90

    Example: bexp best latest --format accelerate > accelerate.yaml
    """
    if export_format is not None:
        _check_format(export_format, as_json=as_json)
    with connect_or_embed() as client:
        job = find_job(client, job_id)
        result = client.recommendation(job.id)
        known = result.recommendation if result is not None else None
        if as_json:
            print_json(document(client, job))
        printed = as_json or export_format is not None
        reports = client.run_reports(job.id) if known is not None and not printed else ()
        exported = client.export(job.id, export_format) if known is not None and export_format is not None else None
    if known is None:
        reason = _why_nothing(job, result)
        failed = job.state == "failed" and result is None
        raise CommandError(ExitCode.SERVICE if failed else ExitCode.NO_ANSWER, f"no recommendation: {reason}")
    chosen = known.dividing if divides else known
    if export_format is not None:  # an export keeps the batch
        chosen = known.dividing or known
    if chosen is None:
        raise CommandError(ExitCode.NO_ANSWER, no_dividing_text(known, job.request))
    size = chosen.candidate.micro_batch_size
    if min_confidence is not None and chosen.confidence < min_confidence:
        raise CommandError(
            ExitCode.NO_ANSWER,
            f"micro_batch_size {size} has confidence {chosen.confidence}, below --min-confidence {min_confidence}",
        )
    if exported is not None:
        typer.echo(exported.text, nl=False)
        for note in exported.notes:
            say(note)
    elif not as_json:
        typer.echo(size)
        if result is not None and result.target_version is not None:
            say(f"measured: {result.measured}")
        if job.answered_from is not None:
            at = f"{job.answered_from.measured_at.astimezone():%Y-%m-%d %H:%M}"
            say(f"measured by exploration {job.answered_from.exploration}, {at}; `--fresh` measures again")
        for report in reports:
            say(render_run_report(report, known))
    for warning in () if exported is not None else _warnings(job, known, chosen):
        say(f"warning: {warning}")
    if not job.is_final:
        say(f"confidence {chosen.confidence} out of 100; the exploration is {job.state}")


def _check_format(name: str, *, as_json: bool) -> None:
    if as_json:
        raise CommandError(ExitCode.USAGE, "--format prints a file, and --json another: choose one of them")
    try:
        find_format(name)
    except UnknownFormatError as error:
        raise CommandError(ExitCode.USAGE, f"--format {name}: {error}") from error


def _warnings(job: Job, known: Recommendation, chosen: Recommendation | DividingCandidate) -> Iterator[str]:
    """Yield what a script that reads the printed number alone would not know."""
    other = known.dividing
    if job.is_final and job.request is not None and is_provisional(chosen.confidence, job.request):
        target = job.request.budget.confidence_target
        yield f"provisional: confidence {chosen.confidence} is below {target}, which was asked for"
    if isinstance(chosen, DividingCandidate):
        if chosen.predicted:
            yield "predicted in part; an exploration with `--micro-batch-size auto` measures what divides the batch"
    elif known.nearest_batch_sizes and other is None:
        yield no_dividing_text(known, job.request)
    elif known.nearest_batch_sizes and other is not None:
        batch = "the batch" if job.request is None else f"batch_size {job.request.batch_size}"
        yield (
            f"{known.candidate.micro_batch_size} does not divide {batch}; {other.candidate.micro_batch_size} does, "
            f"{slower_text(other.loss)}: `bexp best {job.id} --divides`"
        )


def list_(
    state: Annotated[JobState | None, typer.Option(help="List only explorations in this state.")] = None,
    model: Annotated[str | None, typer.Option(help="List only explorations of the model with this name.")] = None,
    labels: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="KEY=VALUE", help="List only explorations with this label; may be repeated."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many to list, the newest first.")] = 20,
    as_json: options.AsJson = False,
) -> None:
    """List explorations, the newest first.

    Example: bexp list --label team=search --state succeeded
    """
    options.parse_labels(labels)
    with connect_or_embed() as client:
        jobs = _newest(client, limit, state=state, model=model, labels=labels or ())
    if as_json:
        print_json([job.model_dump(mode="json") for job in jobs])
        return
    labelled = any(job.labels for job in jobs)
    names = ("ID", "STATE", "MODEL", "MICRO_BATCH_SIZE", "CONFIDENCE", "CREATED")
    rows: list[tuple[str, ...]] = []
    for job in jobs:
        created = f"{job.created_at.astimezone():%Y-%m-%d %H:%M:%S}"
        row = (job.id, job.state, job.model, _or_dash(job.micro_batch_size), _or_dash(job.confidence), created)
        rows.append(row + (" ".join(f"{key}={value}" for key, value in job.labels.items()),) * labelled)
    print_table(names + ("LABELS",) * labelled, rows)


def cancel(job_id: JobId, as_json: options.AsJson = False) -> None:
    """End an exploration. `bexp resume` goes on with it.

    Example: bexp cancel latest
    """
    with connect_or_embed() as client:
        before = find_job(client, job_id)
        job = client.cancel(before.id)
    if as_json:
        print_json(job.model_dump(mode="json"))
    elif before.is_final or job.state not in {"cancelled", "queued", "running"}:
        say(f"exploration {job.id} had ended before: it is {job.state}")
    else:
        say(f"exploration {job.id} is cancelled" if job.is_final else f"exploration {job.id} is being cancelled")


def follow_job(client: Client, job: Job, *, as_json: bool) -> ExitCode:
    """Follow an exploration that goes on whatever happens to this command, and print its answer."""
    try:
        last = follow(client, job, to_stderr=as_json)
    except KeyboardInterrupt:
        say_best(client, job.id)
        say(f"the exploration goes on; `bexp watch {job.id}` follows it again, `bexp cancel {job.id}` ends it")
        raise
    return conclude(client, job.id, last, as_json=as_json)


def _newest(client: Client, limit: int, **wanted: Any) -> list[Job]:
    jobs: list[Job] = []
    cursor: str | None = None
    while len(jobs) < limit:
        page = client.list(**wanted, limit=min(100, limit - len(jobs)), cursor=cursor)
        jobs += page.jobs
        cursor = page.next_cursor
        if cursor is None:
            break
    return jobs


def _why_nothing(job: Job, result: Result | None) -> str:
    variant = result.answer.variants[0] if result is not None and result.answer is not None else None
    return (variant.reason if variant is not None else job.error) or f"the exploration is {job.state}"


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
