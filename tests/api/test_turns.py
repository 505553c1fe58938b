"""Turns: how many requests of one address are in work at the same time."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import cycle, islice
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from bexp.api import peers
from bexp.api.deadlines import DeadlineMiddleware
from bexp.api.peers import Peer, read_proxy
from bexp.api.settings import ServiceSettings
from bexp.api.turns import AT_ONCE, FEW, TurnMiddleware
from tests.api.serving import Served
from tests.waits import PATIENCE_SECONDS, wait_until

HALF = {"type": "http.request", "body": b"{", "more_body": True}
WHOLE = {"type": "http.request", "body": b""}  # without the key, nothing follows
CROWD, OTHER = Peer("10.0.0.1"), Peer("10.0.0.2")


class Work:
    """An application that notes who is in work, and answers when it is told to."""

    def __init__(self, **settings: Any) -> None:
        self.begun: list[str] = []
        self.statuses: list[int] = []
        self.reads_body = True
        self.body_limits: list[asyncio.Timeout] = []
        self.may_answer, self.may_end = asyncio.Event(), asyncio.Event()
        chosen = ServiceSettings("sqlite://", **settings)
        self.middleware = TurnMiddleware(self._work, chosen)
        self.turns = DeadlineMiddleware(self.middleware, chosen.answer_seconds)

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with asyncio.timeout(None) as limit:
            self.body_limits.append(limit)
            while self.reads_body and (await receive()).get("more_body"):
                pass
        self.begun.append(scope["path"])
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await self.may_end.wait()
        await send({"type": "http.response.body", "body": b""})

    def ask(
        self, path: str, peer: Peer, headers: dict[str, str] | None = None, *messages: Message | asyncio.Future[Message]
    ) -> asyncio.Task[None]:
        encoded = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        method = "POST" if messages else "GET"
        scope: Scope = {"type": "http", "method": method, "path": path, "headers": encoded}
        scope["state"], scope["client"] = {"peer": peer}, ("", 0)
        given: Iterator[Message | asyncio.Future[Message]] = iter(messages or (WHOLE,))

        async def receive() -> Message:
            message = next(given, asyncio.Future[Message]())
            return await message if isinstance(message, asyncio.Future) else message

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.statuses.append(message["status"])

        return asyncio.create_task(self.turns(scope, receive, send))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_an_address_waits_for_itself_and_not_for_another() -> None:
    async def run() -> None:
        work = Work()
        crowd = [work.ask("/crowd", CROWD) for _ in range(3 * AT_ONCE)]
        await settle()
        assert work.begun == ["/crowd"] * AT_ONCE
        other = work.ask("/other", OTHER)
        await settle()
        assert work.begun[-1] == "/other"
        work.may_answer.set()
        await settle()
        assert len(work.begun) == 3 * AT_ONCE + 1, "a response that has started, as a stream's, takes no turn"
        work.may_end.set()
        await asyncio.gather(other, *crowd)
        assert not work.middleware._turns._num, "what is answered leaves nothing behind"
        assert not work.middleware._turns._turns

    asyncio.run(run())


def test_a_request_that_is_not_yet_there_takes_no_turn() -> None:
    async def run() -> None:
        work = Work()
        late = [work.ask("/late", CROWD, {"content-length": "2"}, HALF) for _ in range(AT_ONCE)]
        here = work.ask("/here", CROWD)
        await settle()
        assert work.begun == ["/here"]
        sent = work.ask("/sent", CROWD, {"transfer-encoding": "chunked"}, HALF, WHOLE)
        await settle()
        assert work.begun == ["/here", "/sent"]
        for task in (*late, here, sent):
            task.cancel()

    asyncio.run(run())


def test_a_request_whose_body_comes_late_waits_for_a_turn_again() -> None:
    async def run() -> None:
        work = Work()
        rest: asyncio.Future[Message] = asyncio.Future()
        work.ask("/late", CROWD, {"content-length": "2"}, HALF, rest)
        await settle()
        crowd = [work.ask("/crowd", CROWD) for _ in range(AT_ONCE)]
        await settle()
        rest.set_result(WHOLE)
        await settle()
        assert work.begun == ["/crowd"] * AT_ONCE
        crowd[0].cancel()
        await settle()
        assert work.begun[-1] == "/late"

    asyncio.run(run())


def test_a_body_that_nobody_reads_does_not_spare_the_turn() -> None:
    async def run() -> None:
        work = Work()
        work.reads_body = False
        for _ in range(2 * AT_ONCE):
            work.ask("/crowd", CROWD, {"content-length": "1"}, HALF)
        await settle()
        assert len(work.begun) == AT_ONCE

    asyncio.run(run())


def test_a_body_that_is_there_is_not_too_late_because_it_waits_for_a_turn() -> None:
    async def run() -> None:
        work = Work()
        rest: asyncio.Future[Message] = asyncio.Future()
        late = work.ask("/late", CROWD, {"content-length": "2"}, HALF, rest)
        await settle()
        for _ in range(AT_ONCE):
            work.ask("/crowd", CROWD)
        await settle()
        rest.set_result(WHOLE)
        await settle()
        work.body_limits[0].reschedule(asyncio.get_running_loop().time())
        await late
        assert work.statuses == [503]

    asyncio.run(run())


def test_a_client_that_has_gone_leaves_its_turn_to_the_next() -> None:
    async def run() -> None:
        work = Work()
        gone = [work.ask("/gone", CROWD) for _ in range(2 * AT_ONCE)]
        await settle()
        for task in gone:
            task.cancel()
        work.ask("/next", CROWD)
        await settle()
        assert work.begun[-1] == "/next"

    asyncio.run(run())


def test_a_request_that_waits_too_long_is_refused_and_waits_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bexp.api.turns.WAITING_SHARE", 0.3 / PATIENCE_SECONDS)  # long before the answer's deadline

    async def run() -> None:
        work = Work(answer_seconds=PATIENCE_SECONDS)
        crowd = [work.ask("/crowd", CROWD) for _ in range(FEW + 2)]
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(work.statuses) < FEW + 2 - AT_ONCE:
                await asyncio.sleep(0.01)
        assert work.statuses.count(429) == 2
        assert work.statuses.count(503) >= FEW - AT_ONCE, "not the number of so few keeps them waiting"
        work.may_answer.set()
        work.may_end.set()
        await asyncio.gather(*crowd)
        assert work.begun == ["/crowd"] * AT_ONCE

    asyncio.run(run())


def test_more_than_there_may_be_connections_are_refused() -> None:
    async def run() -> None:
        work = Work(max_connections=AT_ONCE + 1)
        for _ in range(AT_ONCE + 2):
            work.ask("/crowd", CROWD)
        await settle()
        assert work.statuses == [429]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("peers", "headers", "begun"),
    [
        ([Peer("127.0.0.1", 1000), Peer("127.0.0.2", 1000)], {}, AT_ONCE),
        ([Peer("127.0.0.1", 1000), Peer("127.0.0.1", 1001)], {}, 2 * AT_ONCE),
        ([Peer("2001:db8::1"), Peer("2001:db8::2")], {}, AT_ONCE),
        ([Peer("10.9.0.1"), Peer("10.9.0.2")], {"x-forwarded-for": "192.0.2.1"}, AT_ONCE),
        ([CROWD, OTHER], {"x-forwarded-for": "192.0.2.1"}, 2 * AT_ONCE),
    ],
    ids=["addresses of a user", "users of an address", "a network", "behind two proxies", "who is no proxy"],
)
def test_whose_turn_it_is(peers: list[Peer], headers: dict[str, str], begun: int) -> None:
    async def run() -> None:
        work = Work(require_token=True, trusted_proxies=(read_proxy("10.9.0.0/16"),))
        for peer in peers * AT_ONCE * 2:
            work.ask("/", peer, headers)
        await settle()
        assert len(work.begun) == begun

    asyncio.run(run())


PATHS = ("/openapi.json", "/web/charts.js", "/healthz", "/readyz", "/v1/explorations", "/docs", "/nothing")
NUM_PIPELINED = 2 * len(PATHS)


def test_who_sends_many_requests_over_many_connections_keeps_nobody_else_waiting(
    serve: Callable[[ServiceSettings], Served], settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it asks for, and whether or not it reads an answer before it sends the next request."""
    crowd, begun, may_answer = set[int](), list[str](), list[bool]()
    monkeypatch.setattr(peers, "_find_uid", lambda client, server: 4712 if client[1] in crowd else os.geteuid())
    served = serve(replace(settings, is_open=True))
    router = served.app.router
    route = router.middleware_stack

    async def hold(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["client"][1] in crowd:
            begun.append(scope["path"])
            while not may_answer:
                await asyncio.sleep(0.01)
        await route(scope, receive, send)

    router.middleware_stack = hold
    host, port = urlsplit(served.url).hostname, urlsplit(served.url).port

    def ask(stack: ExitStack, first: int) -> socket.socket:
        connection = stack.enter_context(socket.socket())
        connection.bind(("127.0.0.1", 0))
        crowd.add(connection.getsockname()[1])
        connection.connect((host, port))
        paths = islice(cycle(PATHS), first, first + NUM_PIPELINED)
        connection.sendall("".join(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n" for path in paths).encode())
        return connection

    with ExitStack() as stack:
        connections = [ask(stack, 0)]
        wait_until(lambda: bool(begun))
        time.sleep(0.2)
        assert len(begun) == 1, "one request of a connection at a time"
        connections += [ask(stack, first) for first in range(1, len(PATHS) * 2)]
        wait_until(lambda: len(begun) == AT_ONCE)
        assert {httpx.get(f"{served.url}{path}").status_code for path in PATHS} == {200, 404}
        assert len(begun) == AT_ONCE
        may_answer.append(True)
        wait_until(lambda: len(begun) == NUM_PIPELINED * len(connections))
