"""`bexp explore`: everything in one command."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from api.cli import options
from api.cli.connection import environment
from api.cli.errors import say
from api.cli.following import follow
from api.cli.results import conclude
from api.client import Client, Job, ProblemError, ServiceError
from api.embedded import EmbeddedService
from explorer.events import Event

WorkerDevice = Annotated[str | None, typer.Option(metavar="cpu|cuda:0|cuda:0-3", help="What to explore on.")]


def explore(
    config: options.Config,
    device: WorkerDevice = None,
    micro_batch_size: options.MicroBatchSize = None,
    batch_size: options.BatchSize = None,
    num_devices: options.NumDevices = None,
    seq_length: options.SeqLength = None,
    memory_limit_gib: options.MemoryLimitGiB = None,
    mode: options.ModeOption = None,
    execution: options.ExecutionOption = None,
    max_seconds: options.MaxSeconds = None,
    max_trials: options.MaxTrials = None,
    confidence_target: options.ConfidenceTarget = None,
    seed: options.Seed = None,
    as_json: options.AsJson = False,
) -> None:
    """Explore a model on this machine and print the best micro_batch_size."""
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
            "max_seconds": max_seconds,
            "max_trials": max_trials,
            "confidence_target": confidence_target,
            "seed": seed,
        },
    )
    database_url = environment().database_url
    with (
        EmbeddedService(database_url, with_worker=True, device=device) as service,
        Client(service.url) as client,
    ):
        job = client.submit(request)
        say(f"exploration {job.id}, kept in {database_url}")
        last = _follow_or_cancel(client, job, service, as_json=as_json)
        code = conclude(client, job.id, last, as_json=as_json)
    raise typer.Exit(code)


def _follow_or_cancel(client: Client, job: Job, service: EmbeddedService, *, as_json: bool) -> Event:
    try:
        return follow(client, job, to_stderr=as_json, check=service.check)
    except BaseException:
        # Nobody else will run it: whatever stopped the command stops the exploration.
        with suppress(ProblemError, ServiceError):
            client.cancel(job.id)
        raise
