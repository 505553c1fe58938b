"""Turns: the requests of one address wait for each other, so that they keep nobody else's waiting.

Without them each open connection has a request in work, and whoever opens most connections has most of the service.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from http import HTTPStatus

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bexp.api.deadlines import has_body
from bexp.api.peers import peer_of
from bexp.api.problems import database_unavailable, problem_response
from bexp.api.rate_limits import address_key
from bexp.api.settings import ServiceSettings

WAITING_SHARE = 0.8
"""How much of the time to the start of a response a request may wait for its turn; the rest is for its answer."""
AT_ONCE = 4
"""Requests of one address, or of one user of this machine, that are worked on at the same time.

A process computes one at a time. More at once take the turns of the processor in any order, so the slowest wait longer.
"""
FEW = 32
"""Among so many, AT_ONCE at a time, one waits too long only if each takes about half a second."""


class TurnMiddleware:
    """Begins a request when fewer than AT_ONCE of its address are in work: neither answered yet nor awaiting a body.

    A request leaves its turn to the next one when its response starts, so that streams take none. Until its body has
    come it takes one only for what is done before, as for the check of its token. More of an address
    than there may be connections are refused, and one that waits too long. If fewer than FEW were there before it, it
    is not they who keep it waiting: the database does not answer those in work.
    """

    def __init__(self, app: ASGIApp, settings: ServiceSettings) -> None:
        self.app = app
        self._settings = settings
        self._turns: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(AT_ONCE))
        self._num: defaultdict[str, int] = defaultdict(int)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        key = self._key(scope)
        if self._num[key] >= self._settings.max_connections:  # those whose clients have gone still wait
            await _refuse(scope, receive, send)
            return
        turn = _Turn(self._turns[key], WAITING_SHARE * self._settings.answer_seconds)
        is_among_few = self._num[key] < FEW
        self._num[key] += 1

        is_whole = not has_body(scope)

        async def receive_without_turn() -> Message:
            nonlocal is_whole
            if is_whole:
                return await receive()
            leaving = asyncio.get_running_loop().call_soon(turn.leave)  # at once, unless the message is there
            message = await receive()
            leaving.cancel()
            is_whole = not message.get("more_body", False)
            if is_whole:
                try:
                    await turn.begin()
                except asyncio.CancelledError:  # by the limit on the time that a body takes: this one was there
                    raise TurnError from None
            return message

        async def start_and_leave(message: Message) -> None:
            turn.end()
            await send(message)

        try:
            await turn.begin()
            await self.app(scope, receive_without_turn, start_and_leave)
        except TurnError:
            if is_among_few:
                await database_unavailable(Request(scope))(scope, receive, send)
            else:
                await _refuse(scope, receive, send)
        finally:
            turn.end()
            self._num[key] -= 1
            if not self._num[key]:
                del self._num[key], self._turns[key]

    def _key(self, scope: Scope) -> str:
        peer = peer_of(scope)
        client = peer.forwards_for(Headers(scope=scope), self._settings.trusted_proxies)
        return f"user {peer.uid}" if client is None and peer.uid is not None else address_key(client or peer.address)


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    detail = "This address has too many requests."
    status = HTTPStatus.TOO_MANY_REQUESTS
    await problem_response(Request(scope), status, detail, headers={"Retry-After": "1"})(scope, receive, send)


class TurnError(Exception):
    """A request has waited too long for its turn."""


class _Turn:
    """One request's, which may wait for it so many `seconds` in all."""

    def __init__(self, turns: asyncio.Semaphore, seconds: float) -> None:
        self._turns = turns
        self._seconds_left = seconds
        self._is_held = self._has_ended = False

    async def begin(self) -> None:
        if self._is_held or self._has_ended:
            return
        since = time.monotonic()
        try:
            await asyncio.wait_for(self._turns.acquire(), self._seconds_left)
        except TimeoutError:
            raise TurnError from None
        self._seconds_left -= time.monotonic() - since
        self._is_held = True

    def leave(self) -> None:
        if self._is_held:
            self._turns.release()
        self._is_held = False

    def end(self) -> None:
        self.leave()
        self._has_ended = True
