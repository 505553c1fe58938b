"""The limit on the time to the start of a response."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from bexp.api.deadlines import DeadlineMiddleware

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
