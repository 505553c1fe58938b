"""A limit on the time to the start of a response, for a database or a service that neither answers nor refuses."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bexp.api.problem_responses import refused
from bexp.api.refusals import Refuse, database_unavailable

logger = logging.getLogger(__name__)


class DeadlineMiddleware:
    """Answers 503 if a response has not started after `seconds`, not counting the wait for the request's body.

    `refuse` makes the answer. A thread that waits for the database cannot be stopped. It is left to its own time
    limits, and its result is dropped.
    """

    def __init__(self, app: ASGIApp, seconds: float, refuse: Refuse = database_unavailable) -> None:
        self.app = app
        self.seconds = seconds
        self._refuse = refuse
        self._abandoned: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        loop = asyncio.get_running_loop()
        started: asyncio.Future[bool] = loop.create_future()

        def settle(in_time: bool) -> None:
            if not started.done():
                started.set_result(in_time)

        timer = loop.call_later(self.seconds, settle, False)
        is_whole = not has_body(scope)

        async def receive_untimed() -> Message:
            nonlocal timer, is_whole
            if is_whole:
                return await receive()
            timer.cancel()
            left = timer.when() - loop.time()
            try:
                message = await receive()
            finally:
                timer = loop.call_later(left, settle, False)
            is_whole = not message.get("more_body", False)
            return message

        async def send_in_time(message: Message) -> None:
            settle(True)
            if started.result():
                await send(message)

        task = asyncio.create_task(_run(self.app, scope, receive_untimed, send_in_time))
        try:
            either: set[asyncio.Future[Any]] = {task, started}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if started.done() and not started.result():  # even if the task has ended since: its answer was dropped
                self._abandon(task)
                refusal = self._refuse()
                logger.warning("no answer in time: %d is sent", refusal.status)
                await refused(Request(scope), refusal)(scope, receive, send)
            else:
                await task
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            timer.cancel()

    def _abandon(self, task: asyncio.Task[None]) -> None:
        self._abandoned.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._abandoned.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("a request failed after the 503 to its client", exc_info=error)


async def _run(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    await app(scope, receive, send)


def has_body(scope: Scope) -> bool:
    """Return whether a body follows the header of a request, by its method."""
    if scope["method"] in {"GET", "HEAD", "DELETE"}:
        return False
    headers = dict(scope["headers"])
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"
