"""The limit on the time to the start of a response."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

import pytest

from bexp.api.deadlines import DeadlineMiddleware
from tests.waits import PATIENCE_SECONDS

SECONDS = 0.01


@pytest.mark.parametrize("turns", range(6))
def test_a_response_that_comes_just_too_late_is_replaced_and_not_dropped(turns: int) -> None:
    sent: list[Any] = []

    async def answer(_scope: Any, _receive: Any, send: Any) -> None:
        time.sleep(2 * SECONDS)  # the loop is held up until the time is over
        for _ in range(turns):
            await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b""}
    asyncio.run(DeadlineMiddleware(answer, SECONDS)(scope, receive, send))
    statuses = [message["status"] for message in sent if message["type"] == "http.response.start"]
    assert statuses in ([200], [503])


@pytest.mark.parametrize(("more", "statuses"), [([], [503]), ([SECONDS * 5], [503]), ([SECONDS * 5, None], [])])
def test_the_time_begins_when_the_whole_body_is_there(more: list[float | None], statuses: list[int]) -> None:
    """`more` are the pauses before further parts of the body; None: the last part does not come."""
    sent: list[Any] = []
    parts = iter([0.0, *more])

    async def answer(_scope: Any, receive: Any, _send: Any) -> None:
        while (await receive()).get("more_body"):
            assert not sent
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        sent.append(message)

    left = len(more)

    async def receive() -> Any:
        nonlocal left
        await asyncio.sleep(60 if (pause := next(parts)) is None else pause)
        left -= 1
        return {"type": "http.request", "body": b"x"} | ({"more_body": True} if left >= 0 else {})

    async def run() -> None:
        headers = [(b"content-length", b"3")]
        scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "query_string": b""}
        task = asyncio.create_task(DeadlineMiddleware(answer, SECONDS)(scope, receive, send))
        await asyncio.wait([task], timeout=PATIENCE_SECONDS if statuses else SECONDS * 20)
        task.cancel()

    asyncio.run(run())
    assert [message["status"] for message in sent if message["type"] == "http.response.start"] == statuses


@pytest.mark.parametrize(("before", "after"), [(60.0, 0.0), (0.03, 0.03)], ids=["before the body", "in all"])
def test_the_work_before_the_body_counts_and_the_wait_for_it_does_not(before: float, after: float) -> None:
    sent: list[Any] = []
    was_waiting_in_vain = False

    async def answer(_scope: Any, receive: Any, send: Any) -> None:
        nonlocal was_waiting_in_vain
        await asyncio.sleep(before)
        await receive()
        was_waiting_in_vain = bool(sent)
        await asyncio.sleep(after)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.sleep(0.1)
        return {"type": "http.request", "body": b"x"}

    async def run() -> None:
        headers = [(b"content-length", b"1")]
        scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "query_string": b""}
        await DeadlineMiddleware(answer, 0.05)(scope, receive, send)

    asyncio.run(run())
    assert [message["status"] for message in sent if message["type"] == "http.response.start"] == [503]
    assert not was_waiting_in_vain


def test_the_time_runs_on_when_the_body_is_not_waited_for_any_more() -> None:
    statuses: list[int] = []

    async def answer(_scope: Any, receive: Any, _send: Any) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(SECONDS):
                await receive()
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        statuses.extend([message["status"]] if message["type"] == "http.response.start" else [])

    async def receive() -> Any:
        await asyncio.sleep(60)

    headers = [(b"content-length", b"1")]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "query_string": b""}
    asyncio.run(DeadlineMiddleware(answer, SECONDS)(scope, receive, send))
    assert statuses == [503]


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_given_up_is_logged_if_it_fails(caplog: pytest.LogCaptureFixture, fails: bool) -> None:
    async def answer(_scope: Any, _receive: Any, _send: Any) -> None:
        await asyncio.sleep(SECONDS * 3)
        if fails:
            raise ValueError("too late")

    async def send(_message: Any) -> None: ...

    async def run() -> None:
        scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b""}
        await DeadlineMiddleware(answer, SECONDS)(scope, send, send)  # type: ignore[arg-type]  # the answer receives nothing
        await asyncio.sleep(SECONDS * 6)

    asyncio.run(run())
    assert [record.getMessage() for record in caplog.records] == [
        "no answer in time: 503 is sent",
        *(["a request failed after the 503 to its client"] if fails else []),
    ]
