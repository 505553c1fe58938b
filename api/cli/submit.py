"""`bexp submit`: an exploration for workers that run already, or will."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bexp.api.cli import options
from bexp.api.cli.arguments import AsJson
from bexp.api.cli.connection import connect
from bexp.api.cli.errors import CommandError, ExitCode, say
from bexp.api.cli.jobs import follow_job
from bexp.api.cli.results import print_json
from bexp.client.errors import ProblemError, ServiceError
from bexp.client.explorations import Exploration, Explorations
from bexp.explorer.model.spelling import did_you_mean
from bexp.explorer.model.target import BEXP, TRANSFORMERS


@options.takes_fields
def submit(
    config: options.Config,
    device: Annotated[
        str | None, typer.Option(metavar="cpu|cuda", help="The kind of device to explore on.", show_default="any")
    ] = None,
    *,
    fields: dict[str, Any],
    target: options.TargetOption = None,
    model: options.ModelOption = None,
    launch: options.LaunchOption = None,
    priority: Annotated[
        int, typer.Option(min=-100, max=100, help="Among the explorations of its owner, the highest is next.")
    ] = 0,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the exploration to its end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Submit a model to the workers of a service or a database, and print the id of the exploration.

    Example: id=$(bexp submit config.json --device cuda --seq-length 4096)
    """
    kind = options.device_kind(device)
    if device != kind:
        message = f"--device {device} is of one machine, and any worker may take what is submitted: give cpu or cuda"
        raise CommandError(ExitCode.USAGE, message, "`bexp explore` measures on a device of this machine")
    request = options.read_request(config, fields, model=model, launch=launch, device_kind=kind, target=target)
    with connect() as client:
        job = client.submit(request, priority=priority)
        for notice in request.notices if not watch else ():
            say(notice)
        if watch:
            say(f"exploration {job.id}")
        elif as_json:
            print_json(job.model_dump(mode="json"))
        else:
            typer.echo(job.id)
        if (missing := missing_target(client, job, request.target_name)) is not None:
            say(missing)
        if watch:
            raise typer.Exit(follow_job(client, job, as_json=as_json))


def missing_target(client: Explorations, job: Exploration, name: str) -> str | None:
    """Return a note that no live worker has a target; None if one has it, or if that is not known.

    Targets that bexp itself brings need no note while there are no workers: any worker will have them.
    """
    if job.is_final:
        return None
    try:
        live = [worker.targets for worker in client.workers() if worker.state != "lost" and not worker.reserved]
    except (ProblemError, ServiceError):  # a token that may submit need not see the workers
        return None
    known = {BEXP, TRANSFORMERS, *(target for targets in live for target in targets)}
    if any(name in targets for targets in live) or (not live and name in known):
        return None
    meant = did_you_mean(name, known - {name})
    return f"no worker has the target '{name}'{meant}: exploration {job.id} waits for one that does"
