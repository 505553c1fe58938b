"""The tools of an agent. Each does what a command does, and returns what the command prints with --json."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, TypeVar

import anyio
from anyio.to_thread import run_sync
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

from bexp.api.agents.commands import Command, Commands
from bexp.api.certainty import describe_certainty
from bexp.api.cli.connection import connect
from bexp.api.cli.errors import CommandError
from bexp.api.cli.failures import describe_failure
from bexp.api.cli.job_ids import find_job
from bexp.api.cli.results import document
from bexp.api.comparison import compare_answers
from bexp.api.refusals import ProblemException
from bexp.client.configuration import read_configuration
from bexp.client.explorations import Exploration, Explorations
from bexp.explorer.formats.request import parse_request

INSTRUCTIONS = """bexp measures which micro-batch size and settings train a language model fastest on the GPUs here.
explore takes a model's config, tune a training command; both return an exploration, which goes on if it outlasts
wait_seconds: ask status and best with its id. Read "certainty" before you use a number: noise, confidence, what was not
measured, and what the next measurement would be worth. compare says whether one answer is faster than another."""
POLL_SECONDS = 0.2
LARGE = {"request", "report", "space", "recommendation", "answer", "text"}

Job = Annotated[str, Field(description="The id of an exploration, its first characters (four or more), or `latest`.")]
Wait = Annotated[
    float, Field(ge=0, le=3600, description="Return after so many seconds at the latest; the exploration goes on.")
]
REMOTE_SECONDS = 10.0
RemoteWait = Annotated[
    float, Field(ge=0, le=REMOTE_SECONDS, description="Return after so many seconds at the latest; then ask status.")
]
Fields = Annotated[
    dict[str, Any] | None,
    Field(description="Fields of the request: batch_size, seq_length, micro_batch_size, trainer, target, budget ..."),
]
Config = Annotated[
    dict[str, Any], Field(description="A request, a Hugging Face config.json, or a Cerebras configuration.")
]
LocalConfig = Annotated[
    dict[str, Any] | str, Field(description="A path to a configuration, its text, or an object. See docs/request.md.")
]
Device = Annotated[str | None, Field(description="cpu, cuda:0, cuda:0-3 or replay:TABLE, of this machine.")]
Open = Callable[[Context], AbstractContextManager[Explorations]]
"""Opens the explorations for one call of a tool, which has the headers of its request if it came over HTTP."""
Pause = Callable[[Context, float], Awaitable[None]]
"""Waits a moment before the next look at an exploration, for so many seconds at most."""
T = TypeVar("T")


def build_server(open_: Open, named: Callable[[str], str] = str) -> MCPServer:
    """Return a server whose tools read explorations; `named` maps another name of an exploration to its id."""
    server = MCPServer(
        "bexp",
        instructions=INSTRUCTIONS,
        version=metadata.version("bexp"),
        log_level="WARNING",
        subscriptions=False,  # nothing here ever changes, and each would hold a connection
    )

    def status(exploration: Job, ctx: Context) -> dict[str, Any]:
        """Return the state of an exploration, and the certainty of its answer."""
        with open_(ctx) as client:
            job = find_job(client, named(exploration))
            return {"job": job.model_dump(mode="json", exclude=LARGE), "certainty": _certainty(client, job)}

    def best(exploration: Job, ctx: Context) -> dict[str, Any]:
        """Return the best micro-batch size and settings so far, with their figures and certainty."""
        with open_(ctx) as client:
            return document(client, find_job(client, named(exploration)))

    def compare(a: Job, b: Job, ctx: Context) -> dict[str, Any]:
        """Say how likely B's answer is faster than A's, how many more runs would tell, and what differs.

        Runs on a busy machine, or at other times, differ by more than their noise: `trials` has its state. The
        probability is near 0.5 where they are level. It fails while one of them has no answer yet.
        """
        with open_(ctx) as client:
            return compare_answers(client, named(a), named(b)).document

    def trials(exploration: Job, ctx: Context) -> dict[str, Any]:
        """Return every measurement of an exploration, with the state of the device during it."""
        with open_(ctx) as client:
            job = find_job(client, named(exploration))
            measured = [trial.model_dump(mode="json") for trial in client.trials(job.id)]
            return {"exploration": job.id, "certainty": _certainty(client, job), "trials": measured}

    _add(server, status, best, compare, trials)
    return server


def add_remote_tools(server: MCPServer, open_: Open, pause: Pause) -> None:
    """Add the tools that leave all work to a service: they read no file of this machine and start nothing on it."""

    async def explore(
        config: Config, ctx: Context, fields: Fields = None, wait_seconds: RemoteWait = REMOTE_SECONDS
    ) -> dict[str, Any]:
        """Explore a model on the service's workers."""
        given = partial(read_configuration, config, **(fields or {}))
        return await _submit(partial(open_, ctx), given, wait_seconds, partial(pause, ctx))

    def doctor(ctx: Context) -> dict[str, Any]:
        """List the service's workers: their devices, versions and targets, and what they do."""
        with open_(ctx) as client:
            return {"workers": [worker.model_dump(mode="json") for worker in client.workers()]}

    _add(server, doctor)
    server.add_tool(explore)


def add_local_tools(server: MCPServer, commands: Commands, *, service: bool) -> None:
    """Add the tools that work on this machine; `service` says that explorations go to a service all the same."""

    async def explore(
        config: LocalConfig, fields: Fields = None, device: Device = None, wait_seconds: Wait = 30.0
    ) -> dict[str, Any]:
        """Explore a model: on the service that BEXP_API_URL names, else, or with a device, on this machine."""
        given = partial(read_configuration, config, **(fields or {}))
        if service and device is None:
            return await _submit(connect, given, wait_seconds, lambda left: anyio.sleep(min(left, POLL_SECONDS)))
        return await run_sync(explore_here, given, device, wait_seconds)

    @_known_failures()
    def explore_here(given: Callable[[], dict[str, Any]], device: str | None, seconds: float) -> dict[str, Any]:
        chosen = [] if device is None else ["--device", device]
        return _follow(commands.start("explore", "-", "--json", *chosen, stdin=json.dumps(given())), seconds)

    def tune(
        command: Annotated[list[str], Field(description="The arguments of the training command.", min_length=1)],
        options: Annotated[
            list[str] | None, Field(description="Options of `bexp tune`, such as --batch-size 64 --max-seconds 120.")
        ] = None,
        folder: Annotated[str | None, Field(description="Where it runs; default: the server's folder.")] = None,
        wait_seconds: Wait = 30.0,
    ) -> dict[str, Any]:
        """Find the best micro-batch size of a training command, by running a few steps of it at several sizes."""
        arguments = ("tune", "--json", *(options or []), "--", *command)
        place = None if folder is None else Path(folder)
        return _follow(commands.start(*arguments, folder=place), wait_seconds)

    def doctor() -> dict[str, Any]:
        """Show which devices and back ends can be used on this machine, and why the others cannot."""
        report = commands.start("doctor", "--json").wait(math.inf)
        assert report is not None, "it has ended"
        return report

    _add(server, tune, doctor)
    server.add_tool(explore)


def _add(server: MCPServer, *tools: Callable[..., dict[str, Any]]) -> None:
    for tool in tools:
        server.add_tool(_known_failures()(tool))


async def _submit(
    open_: Callable[[], AbstractContextManager[Explorations]],
    given: Callable[[], Mapping[str, Any]],
    seconds: float,
    pause: Callable[[float], Awaitable[None]],
) -> dict[str, Any]:
    """Submit an exploration, and wait for its end without a thread; return its id even if the wait fails."""

    def ask(what: Callable[[Explorations], T]) -> T:
        with _known_failures(), open_() as client:
            return what(client)

    def look(client: Explorations) -> Exploration:
        return client.get(job.id)

    deadline = time.monotonic() + seconds
    job = await run_sync(ask, lambda client: client.submit(parse_request(given())))
    with suppress(ToolError, ProblemException):
        while not job.is_final and (left := deadline - time.monotonic()) > 0:
            await pause(left)
            job = await run_sync(ask, look)
        return await run_sync(ask, lambda client: document(client, job))
    return {"job": job.model_dump(mode="json", exclude=LARGE), "certainty": None}


def _follow(command: Command, seconds: float) -> dict[str, Any]:
    result = command.wait(seconds)
    if result is not None:
        return result
    if command.job_id is None:
        return {"job": {"id": command.name, "state": "starting"}, "certainty": None}
    with connect() as client:
        return document(client, find_job(client, command.job_id))


def _certainty(client: Explorations, job: Exploration) -> dict[str, Any] | None:
    return describe_certainty(job, len(client.run_reports(job.id)))


@contextmanager
def _known_failures() -> Iterator[None]:
    """Raise ToolError with the lines that a command would print; a defect stays an error of the server."""
    try:
        yield
    except Exception as error:  # `describe_failure` knows the kinds, and the rest is raised again
        known = error if isinstance(error, CommandError) else describe_failure(error)
        if known is None and not isinstance(error, OSError | ValueError):
            raise
        raise ToolError(str(error) if known is None else "\n".join(known.lines)) from error
