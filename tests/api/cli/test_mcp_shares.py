"""What one token may have of `bexp mcp --http`: it delays no other, however many of its calls wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import pytest

pytest.importorskip("mcp", reason="the extra mcp is not installed")

from mcp.server.mcpserver.exceptions import ToolError

from bexp.api.agents import http, server
from bexp.api.agents.http import Guard, service_unavailable
from bexp.api.agents.server import POLL_SECONDS
from bexp.api.examples import QUEUED
from bexp.api.settings import Limits
from bexp.api.turns import AT_ONCE, Turns
from bexp.client.errors import ServiceError
from bexp.client.explorations import Exploration
from bexp.storage.database import Database
from bexp.storage.tokens import create_token
from tests.api.cli.conversations import ACCEPTED, MESSAGE, serve
from tests.api.cli.samples import TINY
from tests.waits import PATIENCE_SECONDS

NUM_WAITING = 60


def bearer(secret: str) -> dict[str, str]:
    return {**ACCEPTED, "Authorization": f"Bearer {secret}"}


def tool(name: str, **arguments: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": name, "arguments": arguments}}


@pytest.mark.slow
def test_the_waiting_calls_of_a_token_delay_no_other_and_hold_no_thread(guarded: tuple[str, Database]) -> None:
    """More than there are threads. Where each had one, another's call would come after those that have waited."""
    url, database = guarded
    crowd, other = (bearer(create_token(database, name, owner=name)) for name in ("crowd", "other"))
    waits = tool("explore", config=TINY, fields={"fresh": True}, wait_seconds=10)

    async def main() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=100, limits=limits) as client:
            waiting = [asyncio.create_task(client.post(url, json=waits, headers=crowd)) for _ in range(NUM_WAITING)]
            await asyncio.sleep(1)
            for message in (MESSAGE, tool("doctor"), tool("explore", config=TINY, wait_seconds=0)):
                answer = await client.post(url, json=message, headers=other)
                assert (answer.status_code, answer.json()["result"].get("isError", False)) == (200, False)
            assert sum(task.done() for task in waiting) < NUM_WAITING / 2
            answers = await asyncio.gather(*waiting)
        assert {answer.status_code for answer in answers} <= {200, 429, 503}, "it waits for its own others too long"
        told = [answer.json()["result"]["structuredContent"]["job"] for answer in answers if answer.is_success]
        assert {job["state"] for job in told} == {"queued"}
        assert len({job["id"] for job in told}) == len(told)

    asyncio.run(main())


class Work:
    """An application behind the guard that notes whose request is in work, and answers when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **limits: Any) -> None:
        self.begun: list[str] = []
        self.asked: list[str] = []
        self.may_answer = asyncio.Event()
        monkeypatch.setattr(http, "_ask", lambda _, token, *__: self.asked.append(token))
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(Guard(self._work, "http://service", "127.0.0.1", Limits(**limits))),
            base_url="http://127.0.0.1",
        )

    async def _work(self, scope: Any, _receive: Any, send: Any) -> None:
        self.begun.append(dict(scope["headers"])[b"authorization"].decode().removeprefix("Bearer "))
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def ask(self, token: str) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self.client.post("/mcp", headers={"Authorization": f"Bearer {token}"}))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_token_waits_for_itself_and_not_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        work = Work(monkeypatch)
        crowd = [work.ask("crowd") for _ in range(2 * AT_ONCE)]
        await until(lambda: len(work.begun) == AT_ONCE)
        other = work.ask("other")
        await until(lambda: work.begun[-1] == "other")
        assert len(work.begun) == AT_ONCE + 1
        work.may_answer.set()
        assert {(await task).status_code for task in (*crowd, other)} == {200}
        assert work.asked.count("crowd") <= AT_ONCE, "what was checked a moment ago is not checked again"

    asyncio.run(main())


def test_a_token_that_is_refused_is_checked_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        work = Work(monkeypatch)
        monkeypatch.setattr(http, "_ask", refuse)
        assert [(await work.ask("wrong")).status_code for _ in range(2)] == [502, 502]
        assert len(asked) == 2

    asked: list[str] = []

    def refuse(_: str, token: str, *__: Any) -> None:
        asked.append(token)
        raise ServiceError("it is away")

    asyncio.run(main())


def test_an_address_asks_for_a_share_of_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service counts the checks for all clients together."""

    async def main() -> None:
        work = Work(monkeypatch, address_rate=40.0)
        work.may_answer.set()
        statuses = [(await work.ask(f"token-{number}")).status_code for number in range(60)]
        assert statuses[:30] == [200] * 30
        assert 429 in statuses[40:]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("num_open", "at_most", "seconds"), [(1, 10.0, POLL_SECONDS), (60, 10.0, 3.0), (500, 2.0, 2.0)]
)
def test_the_more_calls_wait_the_less_each_looks(
    monkeypatch: pytest.MonkeyPatch, num_open: int, at_most: float, seconds: float
) -> None:
    slept: list[tuple[float, bool]] = []

    async def main() -> None:
        turns = Turns(Limits(), "token", service_unavailable)

        async def sleep(seconds: float) -> None:
            slept.append((seconds, turns._turns["token"].locked()))

        monkeypatch.setattr(asyncio, "sleep", sleep)
        with ExitStack() as stack:
            first, *_ = mine = [stack.enter_context(turns.enter("token")) for _ in range(AT_ONCE)]
            for turn in mine:
                await turn.begin()
            await http.Call(first, lambda: num_open).pause(at_most)
            assert turns._turns["token"].locked(), "it has its turn again"

    asyncio.run(main())
    assert slept == [(seconds, False)]


@pytest.mark.parametrize("fails", ["the wait", "the look", "the answer"])
def test_what_is_submitted_is_told_whatever_fails_then(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """Else the agent would not know what goes on."""
    job = Exploration.model_validate({**QUEUED, "state": "succeeded" if fails == "the answer" else "queued"})

    def refuse(*_: object) -> None:
        raise ServiceError("it is away")

    async def pause(_: float) -> None:
        if fails == "the wait":
            raise service_unavailable()

    client: Any = SimpleNamespace(submit=lambda _: job, get=refuse)
    monkeypatch.setattr(server, "document", refuse)
    told = anyio.run(server._submit, lambda: nullcontext(client), lambda: TINY, 5.0, pause)
    assert (told["job"]["id"], told["certainty"]) == (job.id, None)
    client.submit = refuse
    with pytest.raises(ToolError, match="it is away"):
        anyio.run(server._submit, lambda: nullcontext(client), lambda: TINY, 5.0, pause)


def test_no_stream_is_opened(service: str) -> None:
    """Nothing would ever come, and each would hold a connection."""
    listen = {"jsonrpc": "2.0", "id": 1, "method": "subscriptions/listen", "params": {"notifications": {}}}
    for url in serve(service):
        refused = httpx.get(url, headers={"Accept": "text/event-stream"})
        assert (refused.status_code, refused.headers["Allow"]) == (405, "POST")
        for version in ({}, {"MCP-Protocol-Version": "2026-07-28", "Mcp-Method": "subscriptions/listen"}):
            answer = httpx.post(url, json=listen, headers={**ACCEPTED, **version})
            assert answer.headers["Content-Type"] == "application/json"
            assert "error" in answer.json()
