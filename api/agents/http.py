"""The MCP server on a port. Those who may use the service may use it, with the same tokens, and nobody else."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

import anyio
import anyio.to_thread
from mcp.server.mcpserver import Context
from mcp.server.transport_security import TransportSecuritySettings
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bexp.api.agents.server import POLL_SECONDS, REMOTE_SECONDS, add_remote_tools, build_server
from bexp.api.bodies import read_body
from bexp.api.cli.errors import CommandError, ExitCode, say
from bexp.api.deadlines import DeadlineMiddleware
from bexp.api.listener import ListenError, bind, listen, url_of
from bexp.api.peers import peer_of
from bexp.api.problem_responses import refused
from bexp.api.rate_limits import MAX_KEYS, RateLimiter, StreamLimits, address_key, limit_rate
from bexp.api.refusals import ProblemException
from bexp.api.settings import Limits
from bexp.api.turns import Turn, Turns, client_key
from bexp.client.address import EXPLORATIONS, is_loopback, without_secrets
from bexp.client.client import Client
from bexp.client.errors import ProblemError, ServiceError
from bexp.client.explorations import Explorations
from bexp.storage.tokens import digest_of

PATH = "/mcp"
_NO_TOKEN = "A bearer token of the service is required: this connection is not known to be its user's."  # noqa: S105 - a message, and no secret
_TWO_TOKENS = "There are several Authorization headers."
_NEEDS_TOKENS = (
    "this address is reached by other machines, and the service requires no token of this process: start "
    "`bexp serve` with --require-token, or serve a loopback address"
)
NUM_CHECKS = 20
"""The most tokens that are checked at a time. A check waits for no tool, because tools have other threads."""
CHECK_SECONDS = 2.0
"""An accepted token is not checked again for so long. The service itself checks it with each call."""
SHARE_OF_CHECKS = 4
"""The share of one client's address in the checks that the service grants this process, which has one address."""
LOOKS_PER_SECOND = 20.0
"""The rate at which all calls of a token together look whether their explorations have ended."""


def create_app(service_url: str, host: str, limits: Limits) -> ASGIApp:
    """Return the application for an address `host`, whose tools work on the service at `service_url`.

    Each call acts with the token of its own request, never with one of this process.
    """
    patience = 2 * limits.answer_seconds

    @contextmanager
    def open_(ctx: Context) -> Iterator[Explorations]:
        with Client(service_url, _token(ctx.headers or {}), patience) as client:
            yield client

    async def pause(ctx: Context, seconds: float) -> None:
        request = ctx.request_context.request
        assert request is not None, "it came over HTTP"
        call: Call = request.state.call
        await call.pause(seconds)

    server = build_server(open_)
    add_remote_tools(server, open_, pause)
    app = server.streamable_http_app(
        host=host, stateless_http=True, json_response=True, transport_security=_own_names(host)
    )
    guard = Guard(app, service_url, host, limits)
    return DeadlineMiddleware(guard, REMOTE_SECONDS + limits.answer_seconds, service_unavailable)


def serve(service_url: str, host: str, port: int) -> None:
    """Serve until a signal ends it.

    Raises:
        CommandError: other machines reach the address and the service requires no token, or the address cannot be
            listened on.
        ServiceError: the service does not answer.
    """
    if not is_loopback(host):
        try:
            _ask(service_url, "")
        except ProblemError as error:
            if error.status not in (401, 403):
                raise
        else:
            raise CommandError(ExitCode.USAGE, _NEEDS_TOKENS)
    try:
        listener = bind(host, port)
    except ListenError as error:
        raise CommandError(ExitCode.SERVICE, str(error)) from None
    with listener:
        serving = f"serving {url_of(host, listener)}{PATH} for {without_secrets(service_url)}"
        listen(listener, Limits(), partial(create_app, service_url, host), on_ready=lambda: say(serving))


@dataclass(frozen=True, slots=True)
class Call:
    """A request that is admitted, and its turn among those with its token."""

    turn: Turn
    num_open: Callable[[], int]

    async def pause(self, at_most: float) -> None:
        """Wait without a turn, the longer the more calls of this token are open; then wait for a turn."""
        self.turn.leave()
        await asyncio.sleep(min(at_most, max(POLL_SECONDS, self.num_open() / LOOKS_PER_SECOND)))
        await self.turn.begin()


class Guard:
    """Refuses requests whose token the service refuses, and those that exceed the limits of their address or token.

    A request without a token must come from this user, because the service takes this process for its user. On an
    address that other machines reach, each request needs a token.
    """

    def __init__(self, app: ASGIApp, service_url: str, host: str, limits: Limits) -> None:
        self._app = app
        self._url = service_url
        self._is_loopback = is_loopback(host)
        self._limits = limits
        self._patience = 2 * limits.answer_seconds
        self._checks = anyio.CapacityLimiter(NUM_CHECKS)
        self._accepted: dict[str | None, float] = {}
        self._address_turns = Turns(limits, "address", service_unavailable)
        self._token_turns = Turns(limits, "token", service_unavailable)
        self._address_rate = RateLimiter(limits.address_rate / SHARE_OF_CHECKS)
        self._token_rate = RateLimiter(limits.token_rate)
        self._open = StreamLimits(per_token=limits.token_streams, total=limits.max_streams, what="calls")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            await self._answer(scope, receive, send)
        except ProblemException as refusal:
            await refused(Request(scope), refusal)(scope, receive, send)
        except ClientDisconnect:  # nobody waits for a response
            return

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        token = await self._admit(scope)
        if scope["path"] == PATH and scope["method"] != "POST":
            # A GET would open a stream of what this server never sends.
            raise ProblemException(HTTPStatus.METHOD_NOT_ALLOWED, "Send messages by POST.", headers={"Allow": "POST"})
        body = await read_body(Request(scope, receive), self._limits.max_body_bytes, self._limits.body_seconds)
        given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return given.pop() if given else await receive()

        headers = [(name, value) for name, value in scope["headers"] if name != b"authorization"]
        if token:  # tools get what was checked
            headers.append((b"authorization", f"Bearer {token}".encode("latin-1")))
        key = _key(token)
        self._open.check(key)
        with self._open.count(key), self._token_turns.enter(key or "") as turn:
            await turn.begin()
            state = {**scope.get("state", {}), "call": Call(turn, partial(self._open.num_open, key))}
            await self._app({**scope, "headers": headers, "state": state}, replay, send)

    async def _admit(self, scope: Scope) -> str:
        """Return the token of a request after the service has accepted it; empty without one.

        Raises ProblemException if the client may not use this server, or has sent too many requests.
        """
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) > 1:
            raise ProblemException(HTTPStatus.BAD_REQUEST, _TWO_TOKENS)
        token = _token({"authorization": given[0].decode("latin-1")} if given else {})
        if not token and not (self._is_loopback and _is_own(scope)):
            raise _unauthorized(_NO_TOKEN)
        key = _key(token)
        if not self._is_accepted(key):
            with self._address_turns.enter(client_key(scope)) as turn:
                await turn.begin()
                if not self._is_accepted(key):
                    limit_rate(self._address_rate, address_key(peer_of(scope).address), "address")
                    await anyio.to_thread.run_sync(self._check, token, limiter=self._checks)
                    self._accept(key)
        if key is not None:
            limit_rate(self._token_rate, key, "token")
        return token

    def _is_accepted(self, key: str | None) -> bool:
        return time.monotonic() - self._accepted.get(key, -math.inf) < CHECK_SECONDS

    def _accept(self, key: str | None) -> None:
        self._accepted.pop(key, None)
        self._accepted[key] = time.monotonic()
        if len(self._accepted) > MAX_KEYS:
            del self._accepted[next(iter(self._accepted))]

    def _check(self, token: str) -> None:
        """Raise ProblemException if the service does not accept a token."""
        try:
            _ask(self._url, token, self._patience)
        except ProblemError as error:
            detail = "; ".join(error.lines())
            if error.status == HTTPStatus.UNAUTHORIZED:
                raise _unauthorized(detail) from None
            if error.status == HTTPStatus.TOO_MANY_REQUESTS:
                raise ProblemException(HTTPStatus.TOO_MANY_REQUESTS, detail, headers={"Retry-After": "1"}) from None
            raise ProblemException(HTTPStatus.FORBIDDEN, detail) from None
        except ServiceError as error:
            raise ProblemException(HTTPStatus.BAD_GATEWAY, str(error)) from None


def service_unavailable() -> ProblemException:
    """Return the 503 while the service does not do its work."""
    detail = "The service does not answer in time."
    return ProblemException(HTTPStatus.SERVICE_UNAVAILABLE, detail, headers={"Retry-After": "2"})


def _own_names(host: str) -> TransportSecuritySettings:
    """Return the names that a request may give on loopback, against DNS rebinding; elsewhere it needs a token."""
    bound = f"[{host}]" if ":" in host else host
    names = [f"{name}:*" for name in dict.fromkeys((bound, "127.0.0.1", "localhost", "[::1]"))]
    return TransportSecuritySettings(
        enable_dns_rebinding_protection=is_loopback(host),
        allowed_hosts=names,
        allowed_origins=[f"http://{name}" for name in names],
    )


def _ask(service_url: str, token: str, patience: float = 30.0) -> None:
    """Send the service a request with a token, or without an empty one. Raises ProblemError if it refuses."""
    with Client(service_url, token, patience) as client:
        client.connection.request("GET", EXPLORATIONS, params={"limit": 1})


def _is_own(scope: Scope) -> bool:
    """Return whether this user has sent a request, and no proxy of theirs has forwarded it."""
    headers = {name for name, _ in scope["headers"]}
    return not {b"forwarded", b"x-forwarded-for"} & headers and peer_of(scope).is_own


def _token(headers: Mapping[str, str]) -> str:
    """Return the bearer token of a request; empty without one."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _key(token: str) -> str | None:
    """Return the digest of a token, which itself is kept nowhere; None without one."""
    return digest_of(token) if token else None


def _unauthorized(detail: str) -> ProblemException:
    return ProblemException(HTTPStatus.UNAUTHORIZED, detail, headers={"WWW-Authenticate": "Bearer"})
