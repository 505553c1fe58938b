"""The MCP server on a port. Whoever may use the service may use it, with the same token, and nobody else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, suppress

import anyio
import anyio.to_thread
import uvicorn
from mcp.server.mcpserver import Context
from mcp.server.transport_security import TransportSecuritySettings
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from bexp.api.agents.server import add_remote_tools, build_server
from bexp.api.cli.errors import CommandError, ExitCode, say
from bexp.api.peers import find_peer
from bexp.client.address import is_loopback, without_secrets
from bexp.client.client import Client
from bexp.client.connection import EXPLORATIONS
from bexp.client.errors import ProblemError, ServiceError
from bexp.client.explorations import Explorations

_NO_TOKEN = "A bearer token of the service is required: this connection is not known to be its user's."  # noqa: S105 - a message, and no secret
_TWO_TOKENS = "There are several Authorization headers."
_NEEDS_TOKENS = (
    "this address is reached by other machines, and the service requires no token of this process: start "
    "`bexp serve` with --require-token, or serve a loopback address"
)
NUM_CHECKS = 20
"""Requests whose token is checked at a time. They wait for no tool, because tools have other threads."""


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
    app = server.streamable_http_app(
        host=host, stateless_http=True, json_response=True, transport_security=_own_names(host)
    )
    return Guard(app, service_url, host)


def serve(service_url: str, host: str, port: int) -> None:
    """Serve until a signal ends it.

    Raises CommandError for an address that other machines reach if the service requires no token, and ServiceError if
    it does not answer.
    """
    if not is_loopback(host):
        with suppress(ProblemError):
            _ask(service_url, "")
            raise CommandError(ExitCode.USAGE, _NEEDS_TOKENS)
    say(f"serving http://{host}:{port}/mcp for {without_secrets(service_url)}")
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
        self._checks = anyio.CapacityLimiter(NUM_CHECKS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "http":
            given = [value for name, value in scope["headers"] if name == b"authorization"]
            token = _token({"authorization": given[0].decode("latin-1")} if given else {})
            refusal = (
                _refusal(400, _TWO_TOKENS)
                if len(given) > 1
                else await anyio.to_thread.run_sync(self._refuse, scope, token, limiter=self._checks)
            )
            if refusal is not None:
                await refusal(scope, receive, send)
                return
            headers = [(name, value) for name, value in scope["headers"] if name != b"authorization"]
            if token:  # tools get what was checked
                headers.append((b"authorization", f"Bearer {token}".encode("latin-1")))
            scope = {**scope, "headers": headers}
        await self._app(scope, receive, send)

    def _refuse(self, scope: Scope, token: str) -> JSONResponse | None:
        headers = {name.decode("latin-1") for name, _ in scope["headers"]}
        if not token and not (self._is_loopback and _is_own(scope, headers)):
            return _refusal(401, _NO_TOKEN)
        try:
            _ask(self._url, token)
        except ProblemError as error:
            return _refusal(error.status, "; ".join(error.lines()))
        except ServiceError as error:
            return _refusal(502, str(error))
        return None


def _own_names(host: str) -> TransportSecuritySettings:
    """Return what a page of another name cannot pass, by DNS rebinding; elsewhere than on loopback it lacks a token."""
    bound = f"[{host}]" if ":" in host else host
    names = [f"{name}:*" for name in dict.fromkeys((bound, "127.0.0.1", "localhost", "[::1]"))]
    return TransportSecuritySettings(
        enable_dns_rebinding_protection=is_loopback(host),
        allowed_hosts=names,
        allowed_origins=[f"http://{name}" for name in names],
    )


def _ask(service_url: str, token: str) -> None:
    """Ask the service for something with a token; an empty one is not sent. Raises ProblemError if it refuses."""
    with Client(service_url, token) as client:
        client.connection.request("GET", EXPLORATIONS, params={"limit": 1})


def _is_own(scope: Scope, headers: Set[str]) -> bool:
    """Return whether this user has sent a request, and no proxy of theirs has forwarded it."""
    return not {"forwarded", "x-forwarded-for"} & headers and find_peer(scope["client"], scope["server"]).is_own


def _token(headers: Mapping[str, str]) -> str:
    """Return the bearer token of a request; empty without one."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _refusal(status: int, detail: str) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"status": status, "detail": detail}, status, headers, "application/problem+json")
