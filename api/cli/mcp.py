"""`bexp mcp`: tools for an agent."""

from __future__ import annotations

from typing import Annotated

import typer

from bexp.api.cli.connection import connect, environment
from bexp.api.cli.errors import CommandError, ExitCode

PORT = 8643


def mcp(
    http: Annotated[bool, typer.Option("--http", help="Serve streamable HTTP at /mcp, not stdin and stdout.")] = False,
    host: Annotated[
        str, typer.Option(help="Address to bind; beyond loopback, the service must require tokens.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to bind.")] = PORT,
) -> None:
    """Serve tools for an agent over the Model Context Protocol.

    They are explore, tune, status, best, compare, trials and doctor, and speak over stdin and stdout. Over HTTP
    they work on the service that BEXP_API_URL names, with the tokens of that service, and without tune.

    Example: BEXP_API_URL=http://127.0.0.1:8642 bexp mcp --http
    """
    url = environment().api_url
    if http:
        if url is None:
            raise CommandError(ExitCode.USAGE, "--http serves a service: set BEXP_API_URL to its URL")
        from bexp.api.agents.http import serve  # noqa: PLC0415 - needs the extra

        serve(url, host, port)
        return
    from bexp.api.agents.commands import Commands  # noqa: PLC0415 - for this command alone
    from bexp.api.agents.server import add_local_tools, build_server  # noqa: PLC0415 - needs the extra

    with Commands() as commands:
        server = build_server(lambda _: connect(), commands.exploration)
        add_local_tools(server, commands, service=url is not None)
        server.run("stdio")
