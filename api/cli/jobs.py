"""`bexp submit`, `watch`, `best`, `list` and `cancel`: explorations on a service."""

from __future__ import annotations

from typing import Annotated

import typer

from api.answer import render_run_report
from api.cli import options
from api.cli.connection import connect, connect_or_embed
from api.cli.errors import CommandError, ExitCode, say
from api.cli.following import follow
from api.cli.results import conclude, document, print_json
from api.client import Client, Job, JobState, Result

JobId = Annotated[str, typer.Argument(metavar="ID", help="The id of the exploration.")]


def submit(
    config: options.Config,
    device: Annotated[str | None, typer.Option(metavar="cpu|cuda", help="The kind of device to explore on.")] = None,
    micro_batch_size: options.MicroBatchSize = None,
    batch_size: options.BatchSize = None,
    num_devices: options.NumDevices = None,
    seq_length: options.SeqLength = None,
    memory_limit_gib: options.MemoryLimitGiB = None,
    mode: options.ModeOption = None,
    execution: options.ExecutionOption = None,
    target: options.TargetOption = None,
    max_seconds: options.MaxSeconds = None,
    max_trials: options.MaxTrials = None,
    confidence_target: options.ConfidenceTarget = None,
    seed: options.Seed = None,
    fields: options.Set = None,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the exploration to its end.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Submit a model to the service and print the id of the exploration."""
    request = options.read_request(
        config,
        {
            "device_kind": options.device_kind(device),
            "micro_batch_size": options.parse_micro_batch_size(micro_batch_size),
            "batch_size": batch_size,
            "num_devices": num_devices,
            "seq_length": seq_length,
            "memory_limit_gib": memory_limit_gib,
            "mode": mode,
            "execution": execution,
            "target": target,
            "max_seconds": max_seconds,
            "max_trials": max_trials,
            "confidence_target": confidence_target,
            "seed": seed,
            **options.parse_fields(fields),
        },
    )
    with connect() as client:
        job = client.submit(request)
        for notice in request.notices if not watch else ():
            say(notice)
        if watch:
            say(f"exploration {job.id}")
            raise typer.Exit(_watch(client, job, as_json=as_json))
    if as_json:
        print_json(job.model_dump(mode="json"))
    else:
        typer.echo(job.id)


def watch(job_id: JobId, as_json: options.AsJson = False) -> None:
    """Follow an exploration to its end and print its answer."""
    with connect_or_embed() as client:
        raise typer.Exit(_watch(client, client.get(job_id), as_json=as_json))


def best(job_id: JobId, as_json: options.AsJson = False) -> None:
    """Print the best micro_batch_size so far, and what real runs with it have reached."""
    with connect_or_embed() as client:
        job = client.get(job_id)
        result = client.recommendation(job_id)
        known = result.recommendation if result is not None else None
        if as_json:
            print_json(document(client, job))
        elif known is not None:
            typer.echo(known.candidate.micro_batch_size)
            if result is not None and result.target_version is not None:
                say(f"measured: {result.measured}")
            for report in client.run_reports(job_id):
                say(render_run_report(report, known))
    if known is None:
        reason = _why_nothing(job, result)
        failed = job.state == "failed" and result is None
        raise CommandError(ExitCode.SERVICE if failed else ExitCode.NO_ANSWER, f"no recommendation: {reason}")
    if not job.is_final:
        say(f"confidence {known.confidence} out of 100; the exploration is {job.state}")


def list_(
    state: Annotated[JobState | None, typer.Option(help="List only explorations in this state.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many to list, the newest first.")] = 20,
    as_json: options.AsJson = False,
) -> None:
    """List explorations, the newest first."""
    with connect_or_embed() as client:
        jobs = _newest(client, state, limit)
    if as_json:
        print_json([job.model_dump(mode="json") for job in jobs])
        return
    rows = [("ID", "STATE", "MODEL", "MICRO_BATCH_SIZE", "CONFIDENCE", "CREATED")]
    for job in jobs:
        created = f"{job.created_at.astimezone():%Y-%m-%d %H:%M:%S}"
        rows.append((job.id, job.state, job.model, _or_dash(job.micro_batch_size), _or_dash(job.confidence), created))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        typer.echo("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def cancel(job_id: JobId, as_json: options.AsJson = False) -> None:
    """End an exploration."""
    with connect_or_embed() as client:
        job = client.cancel(job_id)
    if as_json:
        print_json(job.model_dump(mode="json"))
    else:
        say(f"exploration {job.id} is cancelled" if job.is_final else f"exploration {job.id} is being cancelled")


def _watch(client: Client, job: Job, *, as_json: bool) -> ExitCode:
    try:
        last = follow(client, job, to_stderr=as_json)
    except KeyboardInterrupt:
        say(f"the exploration goes on; `bexp watch {job.id}` follows it again, `bexp cancel {job.id}` ends it")
        raise
    return conclude(client, job.id, last, as_json=as_json)


def _newest(client: Client, state: JobState | None, limit: int) -> list[Job]:
    jobs: list[Job] = []
    cursor: str | None = None
    while len(jobs) < limit:
        page = client.list(state=state, limit=min(100, limit - len(jobs)), cursor=cursor)
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
