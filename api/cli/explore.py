"""`bexp explore`: a whole exploration in one command."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer

from bexp.api.cli import options
from bexp.api.cli.arguments import AsJson
from bexp.api.cli.connection import environment, shown_url
from bexp.api.cli.errors import CommandError, ExitCode, say
from bexp.api.cli.following import follow
from bexp.api.cli.results import conclude, say_best
from bexp.api.cli.watchdog import Watchdog
from bexp.api.client import Client, Job, ProblemError, ServiceError
from bexp.api.embedded import EmbeddedService
from bexp.explorer.records.event import Event
from bexp.explorer.spec.request import ExplorationRequest
from bexp.explorer.spec.spelling import did_you_mean
from bexp.explorer.spec.target import TRANSFORMERS, describe_target
from bexp.target_registry import installed_targets

CANCEL_SECONDS = 5.0
_LAST_GPU = re.compile(r"cuda(?::(?:\d{1,4}-)?(\d{1,4}))?")

WorkerDevice = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICES",
        help="cpu, cuda:0, cuda:0-3 or replay:TABLE.",
        show_default="as many GPUs as the request can use, else the CPU",
    ),
]


@options.takes_fields
def explore(
    config: options.Config,
    device: WorkerDevice = None,
    *,
    fields: dict[str, Any],
    target: options.LocalTargetOption = None,
    as_json: AsJson = False,
) -> None:
    """Explore a model on this machine and print the best micro_batch_size.

    Example: bexp explore config.json --seq-length 4096 --batch-size 512

    Example: bexp explore examples/olmoe-1b-7b.yaml --device cuda:0 --set 'micro_batch_size=[2,4,8]'
    """
    name, local_target = options.split_target(target)
    request = options.read_request(config, {"device_kind": options.device_kind(device), "target": name, **fields})
    if local_target is None:
        check_target(request, device)
    raise typer.Exit(run_embedded(request, lambda client: client.submit(request), device, target, as_json=as_json))


def check_target(request: ExplorationRequest, device: str | None) -> None:
    """Raise CommandError if the worker that this command starts would not have the request's target."""
    name, installed = request.target_name, installed_targets()
    if name in installed or (device or "").startswith("replay:"):
        return
    if name == TRANSFORMERS:
        hint = "pip install 'bexp[transformers]'"
        raise CommandError(ExitCode.USAGE, f"the target '{name}' needs the library {name}, which is missing: {hint}")
    has = ", ".join(describe_target(*item) for item in installed.items())
    meant = did_you_mean(name, [*installed, TRANSFORMERS])
    raise CommandError(
        ExitCode.USAGE, f"there is no target '{name}' here{meant}; there are {has}; a file is named as train.py:Target"
    )


def run_embedded(
    request: ExplorationRequest,
    start: Callable[[Client], Job],
    device: str | None,
    target: str | None,
    *,
    as_json: bool,
    spares_others: bool = False,
) -> ExitCode:
    """Run an exploration as `open_embedded` does, follow it to its end and print the answer."""
    local = target if options.split_target(target)[1] is not None else None
    with open_embedded(request, start, device, target, spares_others=spares_others) as (client, job, watchdog):
        say(f"exploration {job.id}, kept in {shown_url(environment().database_url)}")
        given = [part for name, value in (("--device", device), ("--target", local)) if value for part in (name, value)]
        again = shlex.join(["bexp", "resume", job.id, *given])
        last = follow_or_cancel(client, job, watchdog, again, as_json=as_json, spares_others=spares_others)
        return conclude(client, job.id, last, as_json=as_json)


@contextmanager
def open_embedded(
    request: ExplorationRequest,
    start: Callable[[Client], Job],
    device: str | None,
    target: str | None = None,
    *,
    spares_others: bool = False,
) -> Iterator[tuple[Client, Job, Watchdog]]:
    """Start a service with one worker and `start` an exploration there, which is the worker's only one.

    `device` and `target` are as on the command line, null if they were not given. What ends the command cancels the
    exploration, with `spares_others` only if no other worker runs it.
    """
    counts = usable_device_counts(request)
    group = counts[-1] > 1
    _check_number_of_devices(device, counts[0])
    owned = request.device_kind if device is None and (request.device_kind == "cpu" or not group) else device
    _check_devices(owned)
    with (
        EmbeddedService(
            environment().database_url,
            with_worker=True,
            device=owned,
            group=group,
            num_devices=counts,
            local_target=options.split_target(target)[1],
        ) as service,
        Client(service.url) as client,
    ):
        job = start(client)
        service.adopt(job.id, spares_others=spares_others)
        yield client, job, Watchdog(client, job, service, counts[0])


def _check_number_of_devices(device: str | None, needed: int) -> None:
    """Raise CommandError if the only worker would own too few devices: the exploration would wait for ever."""
    if device is None or device.startswith("replay:"):
        return
    owned = sum(_count_devices(part) for part in device.split(","))
    if owned < needed:
        message = f"the exploration needs {needed} devices, and --device {device} names {owned}"
        raise CommandError(ExitCode.USAGE, message, "restrict context_parallel.sizes or sharding, or name more devices")


def _check_devices(owned: str | None) -> None:
    """Raise CommandError if the only worker would own a GPU that is not there; it would end after some seconds."""
    parts = [part.strip() for part in (owned or "").split(",")]
    last = max((int(found[1] or 0) for part in parts if (found := _LAST_GPU.fullmatch(part))), default=None)
    if last is None:
        return
    from bexp.measure.visible_gpus import visible_gpus  # noqa: PLC0415 - takes time, and only GPUs need it

    if last >= (number := len(visible_gpus(os.environ))):
        message = f"device 'cuda:{last}' does not exist: {number} CUDA devices are visible"
        raise CommandError(ExitCode.USAGE, message, "`bexp doctor` shows what can be used; --device cpu needs no GPU")


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


def follow_or_cancel(
    client: Client, job: Job, watchdog: Watchdog, again: str, *, as_json: bool, spares_others: bool
) -> Event:
    """Follow an exploration to its end. What stops this stops the exploration, too, because nobody waits for it."""
    try:
        return follow(client, job, to_stderr=as_json, check=watchdog)
    except BaseException as error:  # Ctrl-C too: a job that nobody follows is cancelled
        with suppress(ProblemError, ServiceError):
            other = watchdog.other_worker() if spares_others else None
            if other is None:
                cancel(client, job.id)
            else:
                say(f"exploration {job.id} goes on: worker {other} runs it")
        if isinstance(error, KeyboardInterrupt):
            say_best(client, job.id)
            say(f"`{again}` goes on where it stopped")
        raise


def cancel(client: Client, job_id: str) -> None:
    """Cancel an exploration, and wait some seconds for its end."""
    say(f"cancelling exploration {job_id}")
    deadline = time.monotonic() + CANCEL_SECONDS
    job = client.cancel(job_id)
    while not job.is_final and time.monotonic() < deadline:
        time.sleep(0.1)
        job = client.get(job_id)
