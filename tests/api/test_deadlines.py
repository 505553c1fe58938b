"""The limit on the time to the start of a response."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from bexp.api.deadlines import DeadlineMiddleware
from tests.waits import PATIENCE_SECONDS

SECONDS = 0.01
WHOLE = {"type": "http.request", "body": b"x"}


def statuses(
    answer: Callable[..., Awaitable[None]],
    receive: Callable[[], Awaitable[Any]] | None = None,
    *,
    limit: float = SECONDS,
    patience: float = PATIENCE_SECONDS,
) -> list[int]:
    """The statuses that are sent in so many seconds; a request has a body if `receive` gives it."""
    sent: list[int] = []

    async def send(message: Any) -> None:
        sent.extend([message["status"]] if message["type"] == "http.response.start" else [])

    async def no_body() -> Any:
        return WHOLE

    async def run() -> None:
        headers = [] if receive is None else [(b"content-length", b"1")]
        scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "query_string": b""}
        task = asyncio.create_task(DeadlineMiddleware(answer, limit)(scope, receive or no_body, send))
        await asyncio.wait([task], timeout=patience)
        if task.done():
            task.result()
        task.cancel()

    asyncio.run(run())
    return sent


@pytest.mark.parametrize("turns", range(6))
def test_a_response_that_comes_just_too_late_is_replaced_and_not_dropped(turns: int) -> None:
    async def answer(_scope: Any, _receive: Any, send: Any) -> None:
        time.sleep(2 * SECONDS)  # the loop is held up until the time is over
        for _ in range(turns):
            await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    assert statuses(answer) in ([200], [503])


@pytest.mark.parametrize(("more", "expected"), [([], [503]), ([SECONDS * 5], [503]), ([SECONDS * 5, None], [])])
def test_the_time_begins_when_the_whole_body_is_there(more: list[float | None], expected: list[int]) -> None:
    """`more` are the pauses before further parts of the body; None: the last part does not come."""
    pauses = [0.0, *more]

    async def answer(_scope: Any, receive: Any, _send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await asyncio.sleep(60)

    async def receive() -> Any:
        await asyncio.sleep(60 if (pause := pauses.pop(0)) is None else pause)
        return WHOLE | ({"more_body": True} if pauses else {})

    assert statuses(answer, receive, patience=PATIENCE_SECONDS if expected else SECONDS * 20) == expected


@pytest.mark.parametrize(("before", "after"), [(60.0, 0.0), (0.03, 0.03)], ids=["before the body", "in all"])
def test_the_work_before_the_body_counts_and_the_wait_for_it_does_not(before: float, after: float) -> None:
    has_body = list[bool]()

    async def answer(_scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(before)
        await receive()
        has_body.append(True)
        await asyncio.sleep(after)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Any:
        await asyncio.sleep(0.1)
        return WHOLE

    assert statuses(answer, receive, limit=0.05) == [503]
    assert bool(has_body) is (before < 60), "a request that still sends its body is not refused"


def test_the_time_runs_on_when_the_body_is_not_waited_for_any_more() -> None:
    async def answer(_scope: Any, receive: Any, _send: Any) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(SECONDS):
                await receive()
        await asyncio.sleep(60)

    async def receive() -> Any:
        await asyncio.sleep(60)

    assert statuses(answer, receive) == [503]


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
