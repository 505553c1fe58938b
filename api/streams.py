"""Streams of a job's events. One cheap query per job and tick serves any number of clients."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from anyio.to_thread import run_sync
from sqlalchemy.exc import SQLAlchemyError

from explorer.records.event import Event
from storage.database import Database
from storage.events import read_events

PAGE = 500

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Watch:
    """A job that streams wait for, until it has an event with a seq > `after`."""

    after: int
    watchers: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class EventFeed:
    """Yields a job's events as they are appended.

    No connection is held between two polls. `run` must be kept running while streams are open; `close` ends them.
    """

    def __init__(self, database: Database, *, poll_seconds: float, keep_alive_seconds: float) -> None:
        self._database = database
        self._poll_seconds = poll_seconds
        self._keep_alive_seconds = keep_alive_seconds
        self._watches: dict[str, _Watch] = {}
        self._closing = False

    @property
    def num_watchers(self) -> int:
        """The number of streams that wait for an event."""
        return sum(watch.watchers for watch in self._watches.values())

    async def run(self, beat: Callable[[], None]) -> None:
        """Poll the watched jobs until cancelled; `beat` is called after each round that went well."""
        while True:
            await asyncio.sleep(self._poll_seconds)
            if not self._watches:
                beat()
                continue
            asked = {job_id: watch.after for job_id, watch in self._watches.items()}
            try:
                grown = await run_sync(self._select_grown, asked)
                beat()
            except SQLAlchemyError as error:
                logger.warning("the database does not answer: %s", getattr(error, "orig", error))
                grown = list(asked)  # each stream then gets the error itself, and ends
            for job_id in grown:
                if (watch := self._watches.pop(job_id, None)) is not None:
                    watch.changed.set()

    def close(self) -> None:
        """End every stream, so that a shutdown does not wait for them."""
        self._closing = True
        for watch in self._watches.values():
            watch.changed.set()

    async def follow(self, job_id: str, after: int) -> AsyncIterator[list[Event]]:
        """Yield the events with seq > `after`, page by page, to the one that ends the job.

        An empty page means that nothing happened for a while. Ends early on `close`, and when the database does not
        answer.
        """
        has_ended = False
        while not self._closing:
            try:
                events = await self.read(job_id, after)
            except SQLAlchemyError:
                return
            if events:
                yield events
                after, has_ended = events[-1].seq, events[-1].code.ends_job
            elif has_ended:  # nothing follows, so the job was not resumed
                return
            elif not await self._wait(job_id, after):
                yield []

    async def read(self, job_id: str, after: int) -> list[Event]:
        """Return one page of the stored events."""
        return await run_sync(lambda: read_events(self._database, job_id, after=after, limit=PAGE))

    async def _wait(self, job_id: str, after: int) -> bool:
        """Wait until the job may have an event with seq > `after`; return false if a keep-alive is due first."""
        watch = self._watches.setdefault(job_id, _Watch(after))
        watch.after = min(watch.after, after)
        watch.watchers += 1
        try:
            async with asyncio.timeout(self._keep_alive_seconds):
                await watch.changed.wait()
        except TimeoutError:
            return False
        finally:
            watch.watchers -= 1
            if watch.watchers == 0 and self._watches.get(job_id) is watch:
                del self._watches[job_id]
        return True

    def _select_grown(self, asked: dict[str, int]) -> list[str]:
        return [job_id for job_id, after in asked.items() if read_events(self._database, job_id, after=after, limit=1)]
