"""`bexp watch`, `list` and `cancel`."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from bexp.api.cli.arguments import AsJson, JobId, LogDir, Verbose, parse_labels
from bexp.api.cli.connection import connect
from bexp.api.cli.errors import ExitCode, say
from bexp.api.cli.following import follow
from bexp.api.cli.job_ids import find_job
from bexp.api.cli.results import conclude, print_json, print_table, say_best
from bexp.client.explorations import Exploration, Explorations, State


def watch(job_id: JobId, log_dir: LogDir = None, verbose: Verbose = False, as_json: AsJson = False) -> None:
    """Follow an exploration to its end and print its answer.

    Example: bexp watch latest
    """
    with connect() as client:
        job = find_job(client, job_id)
        raise typer.Exit(follow_job(client, job, as_json=as_json, verbose=verbose, log_dir=log_dir))


def list_(
    state: Annotated[State | None, typer.Option(help="List only explorations in this state.")] = None,
    model: Annotated[str | None, typer.Option(help="List only explorations of the model with this name.")] = None,
    labels: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="KEY=VALUE", help="List only explorations with this label; may be repeated."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many to list, the newest first.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List explorations, the newest first.

    Example: bexp list --label team=search --state succeeded
    """
    parse_labels(labels)
    with connect() as client:
        jobs = list(islice(client.list(state=state, model=model, labels=labels or ()), limit))
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


def cancel(job_id: JobId, as_json: AsJson = False) -> None:
    """End an exploration. `bexp resume` continues it.

    Example: bexp cancel latest
    """
    with connect() as client:
        before = find_job(client, job_id)
        job = client.cancel(before.id)
    if as_json:
        print_json(job.model_dump(mode="json"))
    elif before.is_final or job.state not in {"cancelled", "queued", "running"}:
        say(f"exploration {job.id} had ended before: {job.state}")
    else:
        say(f"exploration {job.id} is cancelled" if job.is_final else f"exploration {job.id} is being cancelled")


def follow_job(
    client: Explorations, job: Exploration, *, as_json: bool, verbose: bool = False, log_dir: Path | None = None
) -> ExitCode:
    """Follow an exploration that goes on without this command, and print its answer."""
    try:
        last = follow(client, job, to_stderr=as_json, log_dir=log_dir)
    except KeyboardInterrupt:
        say_best(client, job.id)
        say(f"the exploration goes on; `bexp watch {job.id}` follows it again, `bexp cancel {job.id}` ends it")
        raise
    return conclude(client, job.id, last, as_json=as_json, verbose=verbose)


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
