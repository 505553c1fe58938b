"""Streams of a job's events. One query finds the jobs with new events; one for each such job serves all its clients."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field

from anyio.to_thread import run_sync
from sqlalchemy.exc import SQLAlchemyError

from bexp.explorer.records.event import Event
from bexp.storage.database import Database
from bexp.storage.events import PAGE, read_events, read_last_seqs
from bexp.storage.notifications import NEW_EVENTS, Listener, parse_events_message

LISTENING_POLL_SECONDS = 5.0
"""PostgreSQL is also polled in this interval, because a notification can be lost with its connection."""

Turn = AbstractAsyncContextManager[object]
NO_TURN: Turn = nullcontext()

logger = logging.getLogger(__name__)


Render = Callable[[Sequence[Event]], bytes]


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a job's events, as `text`; empty if there are none."""

    text: bytes
    last_seq: int
    has_end: bool
    """Its last event ends the job."""
    is_last: bool
    """Nothing follows that event, so the job was not resumed."""


@dataclass(slots=True)
class _Watch:
    """A job that streams follow. It has events up to `last_seq`, as far as is known."""

    last_seq: int = 0
    num_streams: int = 0
    num_waiting: int = 0
    is_lost: bool = False
    """The job is gone, or the database does not answer."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    reads: dict[tuple[int, int, Render], asyncio.Task[Page]] = field(default_factory=dict)

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def learn(self, last_seq: int) -> None:
        if last_seq > self.last_seq:
            self.last_seq = last_seq
            self.wake()

    def lose(self) -> None:
        self.is_lost = True
        self.wake()


class EventFeed:
    """Yields a job's events as they are appended.

    PostgreSQL notifies of new events. SQLite is polled every `poll_seconds`, and so is PostgreSQL while notifications
    fail. Between two polls only the listener holds a connection. `run` must run while streams are open; `close` ends
    them.
    """

    def __init__(self, database: Database, *, poll_seconds: float, keep_alive_seconds: float) -> None:
        self._database = database
        self._poll_seconds = poll_seconds
        self._keep_alive_seconds = keep_alive_seconds
        self._watches: dict[str, _Watch] = {}
        self._missed = asyncio.Event()
        self._closing = False

    @property
    def num_watchers(self) -> int:
        """The number of streams that wait for an event."""
        return sum(watch.num_waiting for watch in self._watches.values())

    async def run(self, beat: Callable[[], None]) -> None:
        """Learn of new events of the watched jobs until cancelled; `beat` is called after each round that went well."""
        loop = asyncio.get_running_loop()

        def receive(message: str | None) -> None:
            loop.call_soon_threadsafe(self._take_message, message)

        listener = Listener(self._database, NEW_EVENTS, receive)
        listener.start()
        try:
            while True:
                await self._pause(listener)
                if self._watches:
                    await self._poll(beat)
                else:
                    beat()
        finally:
            await asyncio.to_thread(listener.close)

    def close(self) -> None:
        """End every stream, so that a shutdown does not wait for them."""
        self._closing = True
        for watch in self._watches.values():
            watch.wake()

    def wake(self, job_ids: Collection[str]) -> None:
        """Make the streams of these jobs look again whether they may continue."""
        for job_id in job_ids:
            if (watch := self._watches.get(job_id)) is not None:
                watch.wake()

    async def follow(
        self,
        job_id: str,
        after: int,
        render: Render,
        *,
        may_continue: Callable[[], bool] = lambda: True,
        turn: Turn = NO_TURN,
    ) -> AsyncIterator[bytes]:
        """Yield the events with seq > `after`, page by page, to the one that ends the job.

        Each page is read and rendered in a `turn`. Streams with the same `render` share pages. An empty text means that
        nothing happened for a while. The stream ends early on `close`, when the job is deleted, when the database does
        not answer, and when it may not continue.
        """
        watch = self._watches.setdefault(job_id, _Watch())
        watch.num_streams += 1
        has_ended = False
        try:
            while may_continue() and not (self._closing or watch.is_lost):
                known = watch.last_seq  # before the read, which then sees at least these events
                try:
                    page = await self._read_together(watch, job_id, after, render, turn)
                except SQLAlchemyError:
                    return
                if page.last_seq > after:
                    yield page.text
                    after, has_ended = page.last_seq, page.has_end
                    if page.is_last:
                        return
                elif known > after:
                    return  # the job was deleted
                elif has_ended:
                    return
                elif not await self._wait(watch, after, may_continue):
                    yield b""
        finally:
            watch.num_streams -= 1
            if not watch.num_streams and self._watches.get(job_id) is watch:
                del self._watches[job_id]

    async def read(self, job_id: str, after: int, render: Render, turn: Turn) -> Page:
        """Return one page of the stored events, which is read and rendered in a `turn`."""
        async with turn:
            return await run_sync(self._read, job_id, after, render)

    def _read(self, job_id: str, after: int, render: Render) -> Page:
        events = read_events(self._database, job_id, after=after)
        if not events:
            return Page(b"", after, has_end=False, is_last=False)
        has_end = events[-1].code.ends_job
        return Page(render(events), events[-1].seq, has_end, is_last=has_end and len(events) < PAGE)

    async def _read_together(self, watch: _Watch, job_id: str, after: int, render: Render, turn: Turn) -> Page:
        """Return the page of `read`, shared by all streams that know of the same events and want the same page."""
        page = (after, watch.last_seq, render)
        if page not in watch.reads:

            def forget(task: asyncio.Task[Page]) -> None:
                del watch.reads[page]
                task.cancelled() or task.exception()  # who waited for it has got the exception

            watch.reads[page] = asyncio.create_task(self.read(job_id, after, render, turn))
            watch.reads[page].add_done_callback(forget)
        return await asyncio.shield(watch.reads[page])

    async def _wait(self, watch: _Watch, after: int, may_continue: Callable[[], bool]) -> bool:
        """Wait until the job may have an event with seq > `after`; return false if a keep-alive is due first."""
        watch.num_waiting += 1
        try:
            async with asyncio.timeout(self._keep_alive_seconds):
                while may_continue() and not (watch.last_seq > after or watch.is_lost or self._closing):
                    await watch.changed.wait()
        except TimeoutError:
            return False
        finally:
            watch.num_waiting -= 1
        return True

    def _take_message(self, message: str | None) -> None:
        if message is None:
            self._missed.set()
            return
        job_id, last_seq = parse_events_message(message)
        if (watch := self._watches.get(job_id)) is not None:
            watch.learn(last_seq)

    async def _pause(self, listener: Listener) -> None:
        """Wait for the next poll, or until messages may have been missed."""
        seconds = max(self._poll_seconds, LISTENING_POLL_SECONDS) if listener.is_listening else self._poll_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._missed.wait()
        except TimeoutError:
            pass
        self._missed.clear()

    async def _poll(self, beat: Callable[[], None]) -> None:
        asked = list(self._watches)
        try:
            last_seqs = await run_sync(read_last_seqs, self._database, asked)
            beat()
        except SQLAlchemyError as error:
            logger.warning("the database does not answer: %s", getattr(error, "orig", error))
            last_seqs = {}  # the streams end, and their clients come back
        for job_id in asked:
            watch = self._watches.get(job_id)
            if watch is None:
                continue
            if job_id in last_seqs:
                watch.learn(last_seqs[job_id])
            else:
                self._watches.pop(job_id).lose()
