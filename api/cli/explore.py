"""`bexp explore`: a whole exploration in one command."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from typing import Annotated

import typer

from api.cli import options
from api.cli.connection import environment, shown_url
from api.cli.errors import CommandError, ExitCode, say
from api.cli.following import follow
from api.cli.results import conclude
from api.client import Client, Job, ProblemError, ServiceError
from api.embedded import EmbeddedService
from bexp.target_registry import installed_targets
from explorer.records.event import Event
from explorer.spec.request import ExplorationRequest
from explorer.spec.target import TRANSFORMERS, describe_target

CANCEL_SECONDS = 5.0
START_SECONDS = 10.0

WorkerDevice = Annotated[
    str | None, typer.Option(metavar="cpu|cuda:0|cuda:0-3|replay:TABLE", help="The devices to explore on.")
]


def explore(
    config: options.Config,
    device: WorkerDevice = None,
    micro_batch_size: options.MicroBatchSize = None,
    batch_size: options.BatchSize = None,
    num_devices: options.NumDevices = None,
    seq_length: options.SeqLength = None,
    memory_limit_gib: options.MemoryLimitGiB = None,
    headroom: options.Headroom = None,
    prefer: options.PreferOption = None,
    mode: options.ModeOption = None,
    execution: options.ExecutionOption = None,
    target: options.LocalTargetOption = None,
    max_seconds: options.MaxSeconds = None,
    max_trials: options.MaxTrials = None,
    confidence_target: options.ConfidenceTarget = None,
    seed: options.Seed = None,
    labels: options.Label = None,
    fresh: options.Fresh = False,
    fields: options.Set = None,
    as_json: options.AsJson = False,
) -> None:
    """Explore a model on this machine and print the best micro_batch_size."""
    target, local_target = options.split_target(target)
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
    raise typer.Exit(_explore(request, device, local_target, as_json=as_json))


def check_target(request: ExplorationRequest, device: str | None) -> None:
    """Raise CommandError if the worker that this command starts would not have the request's target."""
    name, installed = request.target_name, installed_targets()
    if name in installed or (device or "").startswith("replay:"):
        return
    if name == TRANSFORMERS:
        hint = "pip install 'bexp[transformers]'"
        raise CommandError(ExitCode.USAGE, f"the target '{name}' needs the library {name}, which is missing: {hint}")
    has = ", ".join(describe_target(*item) for item in installed.items())
    raise CommandError(
        ExitCode.USAGE, f"there is no target '{name}' here; there are {has}; a file is named as train.py:Target"
    )


def _explore(request: ExplorationRequest, device: str | None, local_target: str | None, *, as_json: bool) -> ExitCode:
    if local_target is None:
        check_target(request, device)
    database_url = environment().database_url
    counts = usable_device_counts(request)
    group = counts[-1] > 1
    _check_number_of_devices(device, counts[0])
    if device is None and (request.device_kind == "cpu" or not group):
        device = request.device_kind
    with (
        EmbeddedService(
            database_url,
            with_worker=True,
            device=device,
            group=group,
            num_devices=counts,
            local_target=local_target,
        ) as service,
        Client(service.url) as client,
    ):
        job = client.submit(request)
        service.adopt(job.id)
        say(f"exploration {job.id}, kept in {shown_url(database_url)}")
        last = _follow_or_cancel(client, job, service, counts[0], as_json=as_json)
        return conclude(client, job.id, last, as_json=as_json)


def _check_number_of_devices(device: str | None, needed: int) -> None:
    """Raise CommandError if the only worker would own too few devices: the exploration would wait for ever."""
    if device is None or device.startswith("replay:"):
        return
    owned = sum(_count_devices(part) for part in device.split(","))
    if owned < needed:
        message = f"the exploration needs {needed} devices, and --device {device} names {owned}"
        raise CommandError(ExitCode.USAGE, message, "restrict context_parallel.sizes or sharding, or name more devices")


def _count_devices(part: str) -> int:
    """Return how many devices `cpu`, `cuda:0` or `cuda:0-3` names; the worker judges whether they exist."""
    found = re.fullmatch(r"cuda:(\d{1,4})-(\d{1,4})", part.strip())
    return max(1, int(found[2]) - int(found[1]) + 1) if found else 1


def usable_device_counts(request: ExplorationRequest) -> tuple[int, ...]:
    """Return the numbers of devices that a worker can use for a request, ascending. Other numbers leave devices idle.

    A worker with all of `num_devices` measures their communication. A worker with as many as share a sequence measures
    context parallelism. A worker with fewer devices uses a single one.
    """
    steps = (1, *request.context_parallel_sizes, request.num_devices)
    return tuple(sorted({request.devices_needed(available) for available in steps}))


def _follow_or_cancel(client: Client, job: Job, service: EmbeddedService, needed: int, *, as_json: bool) -> Event:
    try:
        return follow(client, job, to_stderr=as_json, check=Watchdog(client, job, service, needed))
    except BaseException:
        # No other worker will run the exploration, so what stopped the command stops it, too.
        with suppress(ProblemError, ServiceError):
            _cancel(client, job.id)
        raise


class Watchdog:
    """Checks that the children are alive, and says once why a job that needs `num_devices` does not start."""

    def __init__(self, client: Client, job: Job, service: EmbeddedService, num_devices: int = 1) -> None:
        self._client = client
        self._job_id = job.id
        self._service = service
        self._num_devices = num_devices
        self._speak_at = time.monotonic() + START_SECONDS

    def __call__(self) -> None:
        """Check once."""
        self._service.check()
        if time.monotonic() < self._speak_at:
            return
        self._speak_at = float("inf")
        if self._client.get(self._job_id).state == "queued":
            needs = f"; it needs a worker with {self._num_devices} devices" if self._num_devices > 1 else ""
            say(f"not started after {START_SECONDS:.0f} s{needs}; the worker says: {self._service.last_words()}")


def _cancel(client: Client, job_id: str) -> None:
    say(f"cancelling exploration {job_id}")
    deadline = time.monotonic() + CANCEL_SECONDS
    job = client.cancel(job_id)
    while not job.is_final and time.monotonic() < deadline:
        time.sleep(0.1)
        job = client.get(job_id)
