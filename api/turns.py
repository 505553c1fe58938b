"""Turns: the requests of one address wait for each other, so that they keep nobody else's waiting.

Without them each open connection has a request in work, and whoever opens most connections has most of the service.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from http import HTTPStatus
from typing import Self

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bexp.api.deadlines import has_body
from bexp.api.peers import Proxy, peer_of
from bexp.api.problem_responses import refused
from bexp.api.rate_limits import address_key
from bexp.api.refusals import ProblemException, Refuse, database_unavailable
from bexp.api.settings import Limits, ServiceSettings

WAITING_SHARE = 0.8
"""The share of the time to the start of a response that a request may wait for its turn; the rest is for its answer."""
AT_ONCE = 4
"""Requests of one address, or of one user of this machine, that are worked on at the same time.

A process computes one request at a time. More would take the processor in any order, so the slowest would wait longer.
"""
FEW = 32
"""With so few waiting, AT_ONCE at a time, a request waits too long only if each takes about half a second."""


class TurnMiddleware:
    """Gives each request a turn of its address, or of its user on this machine.

    A request leaves its turn to the next when its response starts, so that streams take none. While its body arrives it
    has no turn; it takes one for the work before, such as the check of its token. The state of the request holds its
    `turn`, for reads after the start of the response.
    """

    def __init__(self, app: ASGIApp, settings: ServiceSettings) -> None:
        self.app = app
        self._proxies = settings.trusted_proxies
        self._turns = Turns(settings, "address", database_unavailable)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            with self._turns.enter(client_key(scope, self._proxies)) as turn:
                await self._take(turn, scope, receive, send)
        except ProblemException as refusal:
            await refused(Request(scope), refusal)(scope, receive, send)

    async def _take(self, turn: Turn, scope: Scope, receive: Receive, send: Send) -> None:
        is_whole = not has_body(scope)
        has_started = False

        async def receive_without_turn() -> Message:
            nonlocal is_whole
            if is_whole or has_started:
                return await receive()
            leaving = asyncio.get_running_loop().call_soon(turn.leave)  # at once, unless the message is there
            message = await receive()
            leaving.cancel()
            is_whole = not message.get("more_body", False)
            if is_whole and not has_started:
                try:
                    await turn.begin()
                except asyncio.CancelledError:  # by the limit on the time that a body takes: this one was there
                    raise turn.refuse() from None
            return message

        async def start_and_leave(message: Message) -> None:
            nonlocal has_started
            if not has_started:
                has_started = True
                turn.leave()
            await send(message)

        scope.setdefault("state", {})["turn"] = turn
        await turn.begin()
        await self.app(scope, receive_without_turn, start_and_leave)


def client_key(scope: Scope, proxies: Collection[Proxy] = ()) -> str:
    """Return the key of a request's turn: its user on this machine, else its address, as `proxies` name it."""
    peer = peer_of(scope)
    client = peer.forwards_for(Headers(scope=scope), proxies)
    return f"user {peer.uid}" if client is None and peer.uid is not None else address_key(client or peer.address)


class Turns:
    """Lets AT_ONCE requests of each key be in work at a time. `what` names the key in a refusal: address or token.

    A request is refused if its key has as many requests as there may be connections, or if it waits too long. With
    fewer than FEW requests before it, they do not cause its wait, but what those in work wait for: then `stalled` makes
    the refusal.
    """

    def __init__(self, limits: Limits, what: str, stalled: Refuse) -> None:
        self._most = limits.max_connections  # those whose clients have gone still wait
        self._seconds = WAITING_SHARE * limits.answer_seconds
        self._what = what
        self._stalled = stalled
        self._turns: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(AT_ONCE))
        self._num: defaultdict[str, int] = defaultdict(int)

    @contextmanager
    def enter(self, key: str) -> Iterator[Turn]:
        """Enter a request, whose turn has not begun yet.

        Raises:
            ProblemException: 429, the key has too many requests.
        """
        if self._num[key] >= self._most:
            raise self._too_many()
        turn = Turn(self._turns[key], self._seconds, self._stalled if self._num[key] < FEW else self._too_many)
        self._num[key] += 1
        try:
            yield turn
        finally:
            turn.leave()
            self._num[key] -= 1
            if not self._num[key]:
                del self._num[key], self._turns[key]

    def _too_many(self) -> ProblemException:
        detail = f"This {self._what} has too many requests."
        return ProblemException(HTTPStatus.TOO_MANY_REQUESTS, detail, headers={"Retry-After": "1"})


class Turn(AbstractAsyncContextManager["Turn"]):
    """The turn of one request, for which it waits at most `seconds` in all; then it raises the error of `refuse`.

    Entered as a context, it waits without a limit.
    """

    def __init__(self, turns: asyncio.Semaphore, seconds: float, refuse: Refuse) -> None:
        self._turns = turns
        self._seconds_left = seconds
        self.refuse = refuse
        self._is_held = False

    async def begin(self) -> None:
        """Wait for the turn.

        Raises:
            ProblemException: 429 or 503, it did not come in time.
        """
        if self._is_held:
            return
        since = time.monotonic()
        try:
            await asyncio.wait_for(self.__aenter__(), self._seconds_left)
        except TimeoutError:
            raise self.refuse() from None
        self._seconds_left -= time.monotonic() - since

    def leave(self) -> None:
        """Leave the turn to the next request; it can be begun again."""
        if self._is_held:
            self._turns.release()
        self._is_held = False

    async def __aenter__(self) -> Self:
        await self._turns.acquire()
        self._is_held = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self.leave()
