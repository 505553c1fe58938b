"""`bexp resume`: continues an exploration that was interrupted."""

from __future__ import annotations

from typing import Annotated

import typer

from bexp.api.cli import options
from bexp.api.cli.arguments import AsJson, JobId, Verbose
from bexp.api.cli.connection import connect, environment, open_stored
from bexp.api.cli.errors import CommandError, ExitCode, say
from bexp.api.cli.explore import WorkerDevice
from bexp.api.cli.job_ids import find_job
from bexp.api.cli.jobs import follow_job
from bexp.api.cli.local_run import LocalRun
from bexp.client.explorations import Exploration
from bexp.explorer.model.target import LOCAL, is_local_target
from bexp.explorer.request.request import ExplorationRequest

LocalTarget = Annotated[
    str | None, typer.Option("--target", metavar="FILE.py:NAME", help="The class of your own that is measured.")
]


def resume(
    job_id: JobId,
    device: WorkerDevice = None,
    target: LocalTarget = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Continue an exploration that was interrupted or cancelled, or that failed.

    Nothing that is stored is measured again. With BEXP_API_URL, the workers of that service continue it and this
    command follows; without it, this command starts a worker, as `bexp explore` does. The worker needs the hardware
    that the exploration started on.

    Example: bexp resume latest
    """
    if environment().api_url is not None:
        if device is not None or target is not None:
            message = "--device and --target are for a worker here, but the workers of BEXP_API_URL continue it"
            raise CommandError(ExitCode.USAGE, message, "leave them out, or unset BEXP_API_URL")
        with connect() as service:
            job = service.resume(find_job(service, job_id).id)
            say(f"exploration {job.id}")
            raise typer.Exit(follow_job(service, job, as_json=as_json, verbose=verbose))
    with open_stored() as stored:
        job = find_job(stored, job_id)
        request = _resumable(job, target)
        if job.state == "running":
            say("it runs already, or its worker has died: this command's worker takes it over if it has")
        is_shared = not job.is_final and not stored.summary(job.id).own_worker
        run = LocalRun(request, job.id, device, target, is_shared=is_shared)
        resumed = stored.resume(job.id, own_worker=run.worker_name)
        with run:
            raise typer.Exit(run.follow(stored, resumed, as_json=as_json, verbose=verbose))


def _resumable(job: Exploration, target: str | None) -> ExplorationRequest:
    """Return the request of an exploration that this command can resume."""
    if job.request is None:
        raise CommandError(ExitCode.NO_ANSWER, f"exploration {job.id} cannot be resumed: {job.error}")
    if job.state == "succeeded":
        raise CommandError(
            ExitCode.USAGE, f"exploration {job.id} has succeeded: `bexp best {job.id}` prints its answer"
        )
    check_target(job.request, target)
    return job.request


def check_target(request: ExplorationRequest, target: str | None) -> None:
    """Raise CommandError if an exploration measures the class of a file, and `--target` names no file of that name."""
    measured, (name, file) = request.target_name, options.split_target(target)
    if not is_local_target(measured) or (file is not None and measured in {LOCAL, name}):
        return
    if "command" in (request.target_config or {}):
        raise CommandError(
            ExitCode.USAGE,
            "the exploration is of a training command, which is not stored as it was",
            "give it again: bexp tune --resume latest -- COMMAND",
        )
    stem = request.explored.name if measured != LOCAL else "FILE"
    raise CommandError(
        ExitCode.USAGE,
        f"the exploration measures a class of your own, with the target '{measured}'",
        f"name its file as it was: --target {stem}.py:NAME",
    )
