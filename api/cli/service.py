"""`bexp serve`, `bexp worker` and `bexp doctor`: commands that start the parts of a service."""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import typer

from bexp.api.cli import options
from bexp.api.cli.arguments import AsJson, LogDir
from bexp.api.cli.connection import database_errors, environment
from bexp.api.cli.errors import CommandError, ExitCode, say
from bexp.api.local_worker import child_environment
from bexp.api.peers import read_proxy
from bexp.api.settings import (
    DEFAULT_ADDRESS_RATE,
    DEFAULT_TOKEN_RATE,
    DEFAULT_TOKEN_STREAMS,
    MAX_WAIT_HOURS,
    ServiceSettings,
)
from bexp.child_process import module_command


def serve(
    host: Annotated[
        str | None, typer.Option(help="Address to bind; requests need a token unless it is a loopback address.")
    ] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port to bind.")] = None,
    require_token: Annotated[
        bool,
        typer.Option(
            "--require-token",
            help="Require tokens on loopback too, and answer under any host name; for use behind a proxy.",
        ),
    ] = False,
    is_open: Annotated[
        bool,
        typer.Option(
            "--open", help="On loopback, serve every user of this machine without a token, not its own alone."
        ),
    ] = False,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="USER|ADDRESS",
            help="A proxy whose X-Forwarded-For names the client: the user that it runs as on this machine, or its "
            "address or network elsewhere. Can be repeated. Requires tokens.",
        ),
    ] = None,
    max_wait_hours: Annotated[
        float,
        typer.Option(
            min=0.001, help="Fail an exploration that no running worker can run after so many hours in the queue."
        ),
    ] = MAX_WAIT_HOURS,
    token_rate: Annotated[
        float, typer.Option(min=0, help="Requests a second of a token, where tokens are required; 0: no limit.")
    ] = DEFAULT_TOKEN_RATE,
    address_rate: Annotated[
        float, typer.Option(min=0, help="The same of an address, with and without a valid token.")
    ] = DEFAULT_ADDRESS_RATE,
    token_streams: Annotated[
        int, typer.Option(min=0, help="Streams of events of a token that are open at once; 0: no limit.")
    ] = DEFAULT_TOKEN_STREAMS,
    keep_days: Annotated[
        float | None, typer.Option(min=0.0, help="Delete finished explorations that are older. Default: never.")
    ] = None,
    keep_jobs: Annotated[
        int | None,
        typer.Option(
            min=0, help="Keep so many finished explorations: the newest, as many of each owner. Default: all."
        ),
    ] = None,
    log_dir: LogDir = None,
) -> None:
    """Serve the REST API.

    Example: bexp serve --host 0.0.0.0 --port 8642
    """
    from bexp.api.listener import ListenError  # noqa: PLC0415 - the web framework takes long to import
    from bexp.api.serve import serve as serve_api  # noqa: PLC0415 - for this command alone

    variables = environment()
    try:
        proxies = tuple(map(read_proxy, trusted_proxy or ()))
    except ValueError as error:
        raise CommandError(ExitCode.USAGE, f"--trusted-proxy: {error}") from None
    try:
        with database_errors():
            serve_api(
                ServiceSettings(
                    variables.database_url,
                    require_token=require_token,
                    is_open=is_open,
                    trusted_proxies=proxies,
                    max_wait_seconds=3600 * max_wait_hours,
                    token_rate=token_rate,
                    address_rate=address_rate,
                    token_streams=token_streams,
                    keep_days=keep_days,
                    keep_jobs=keep_jobs,
                    log_dir=log_dir,
                ),
                host if host is not None else variables.host,
                port if port is not None else variables.port,
                on_ready=lambda url: say(f"serving {url}"),
                notify=say,
            )
    except ListenError as error:
        raise CommandError(ExitCode.SERVICE, str(error)) from None


def worker(
    device: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICES",
            help="cpu, cuda:0, cuda:0-3 or replay:TABLE.",
            show_default="the first GPU, with --group all of them; without a GPU the CPU",
        ),
    ] = None,
    group: Annotated[
        bool,
        typer.Option("--group", help="Start one worker that owns all devices, for jobs that use several at once."),
    ] = False,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Run trials on a Ray cluster (auto: this host's); --device then says what a trial needs.",
        ),
    ] = None,
) -> None:
    """Claim and run explorations until a signal ends the worker.

    Example: bexp worker --device cuda:0-3
    """
    options.device_kind(device)
    given = {"--device": device, "--ray": ray}
    valued = [part for name, value in given.items() if value is not None for part in (name, value)]
    _become_workers(*valued, *(["--group"] if group else []))


def doctor(as_json: AsJson = False) -> None:
    """Show which devices and back ends can be used here, and why the others cannot.

    Example: bexp doctor
    """
    _become_workers("doctor", *(["--json"] if as_json else []))


def _become_workers(*arguments: str) -> NoReturn:
    """Replace this process by the worker, so that the worker gets the signals and sets the exit code."""
    command = module_command("bexp.workers", *arguments)
    os.execve(sys.executable, command, child_environment(environment().database_url))  # noqa: S606 - the interpreter that runs, with arguments of our own
