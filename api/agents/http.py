"""The MCP server on a port. Whoever may use the service may use it, with the same token, and nobody else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import anyio.to_thread
import uvicorn
from mcp.server.mcpserver import Context
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from bexp.api.agents.server import add_remote_tools, build_server
from bexp.api.peers import find_peer
from bexp.client.address import is_loopback
from bexp.client.client import Client
from bexp.client.connection import EXPLORATIONS
from bexp.client.errors import ProblemError, ServiceError
from bexp.client.explorations import Explorations

_NO_TOKEN = "A bearer token of the service is required: this connection is not known to be its user's."  # noqa: S105


def create_app(service_url: str, host: str) -> ASGIApp:
    """Return the application for an address `host`, whose tools work on the service at `service_url`.

    Each call acts with the token of its own request, never with one of this process.
    """

    @contextmanager
    def open_(ctx: Context) -> Iterator[Explorations]:
        with Client(service_url, _token(ctx.headers or {})) as client:
            yield client

    server = build_server(open_)
    add_remote_tools(server, open_)
    # For a loopback address the SDK refuses other Host headers and the pages of other origins.
    return Guard(server.streamable_http_app(host=host, stateless_http=True, json_response=True), service_url, host)


def serve(service_url: str, host: str, port: int) -> None:
    """Serve until a signal ends it."""
    uvicorn.run(create_app(service_url, host), host=host, port=port, log_level="warning", proxy_headers=False)


class Guard:
    """Refuses a request whose token the service refuses.

    A request without one is this user's own or refused, because the service takes this process for its user. On an
    address that other machines reach, each request needs a token.
    """

    def __init__(self, app: ASGIApp, service_url: str, host: str) -> None:
        self._app = app
        self._url = service_url
        self._is_loopback = is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "http":
            refusal = await anyio.to_thread.run_sync(self._refuse, scope)
            if refusal is not None:
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refuse(self, scope: Scope) -> JSONResponse | None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        token = _token(headers)
        if not token and not (self._is_loopback and _is_own(scope, headers)):
            return _refusal(401, _NO_TOKEN)
        try:
            with Client(self._url, token) as client:
                client.connection.request("GET", EXPLORATIONS, params={"limit": 1})
        except ProblemError as error:
            return _refusal(error.status, "; ".join(error.lines()))
        except ServiceError as error:
            return _refusal(502, str(error))
        return None


def _is_own(scope: Scope, headers: Mapping[str, str]) -> bool:
    """Return whether this user has sent a request, and no proxy of theirs has forwarded it."""
    return not {"forwarded", "x-forwarded-for"} & headers.keys() and find_peer(scope["client"], scope["server"]).is_own


def _token(headers: Mapping[str, str]) -> str:
    """Return the bearer token of a request; empty without one."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _refusal(status: int, detail: str) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"status": status, "detail": detail}, status, headers, "application/problem+json")
