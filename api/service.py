"""The resources that the routes of one application share: database, queue, event feed and metrics."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import Depends, Request
from sqlalchemy.exc import SQLAlchemyError

from bexp.api.background import WRITE_SECONDS, Beat, Housekeeper, LogFolder, Supervisor
from bexp.api.bodies import read_text
from bexp.api.metrics import Metrics
from bexp.api.rate_limits import RateLimiter, StreamLimits
from bexp.api.settings import ServiceSettings
from bexp.api.streams import LISTENING_POLL_SECONDS, EventFeed
from bexp.api.tokens import Tokens
from bexp.measure.heap import trim
from bexp.storage.database import Database, DatabaseLimits, open_database
from bexp.storage.queue import Queue
from bexp.storage.schema import NewerSchemaError, try_write

TRIM_SECONDS = 30.0
PROBE_SECONDS = 1.0


async def keep_trimmed(beat: Beat) -> None:
    """Trim until cancelled; `beat` is called after each time."""
    while True:
        await run_sync(trim)
        beat()
        await asyncio.sleep(TRIM_SECONDS)


@dataclass(frozen=True, slots=True)
class Service:
    """The resources of a running application."""

    settings: ServiceSettings
    database: Database
    queue: Queue
    feed: EventFeed
    metrics: Metrics
    supervisor: Supervisor
    write_probe: WriteProbe
    tokens: Tokens
    token_limiter: RateLimiter
    address_limiter: RateLimiter
    stream_limits: StreamLimits
    housekeeper: Housekeeper


class WriteProbe:
    """Tries a write, at most once in PROBE_SECONDS, whatever the number of callers."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._tried_at = -math.inf
        self._trouble: SQLAlchemyError | None = None

    def check(self) -> None:
        """Raise sqlalchemy.exc.SQLAlchemyError if the database does not take a write."""
        with self._lock:
            if time.monotonic() - self._tried_at > PROBE_SECONDS:
                self._trouble = None
                try:
                    try_write(self._database)
                except SQLAlchemyError as error:
                    self._trouble = error
                self._tried_at = time.monotonic()
            if self._trouble is not None:
                raise self._trouble.with_traceback(None)


@asynccontextmanager
async def run_service(settings: ServiceSettings, metrics: Metrics) -> AsyncIterator[Service]:
    """Open the resources of the service, and keep its background work going."""
    database = open_database(settings.database_url, DatabaseLimits())
    feed = EventFeed(database, poll_seconds=settings.poll_seconds, keep_alive_seconds=settings.keep_alive_seconds)
    supervisor = Supervisor()
    queue = Queue(database)
    tokens = Tokens(database, feed, check_seconds=settings.token_check_seconds)
    service = Service(
        settings,
        database,
        queue,
        feed,
        metrics,
        supervisor,
        WriteProbe(database),
        tokens,
        token_limiter=RateLimiter(settings.token_rate),
        address_limiter=RateLimiter(settings.address_rate),
        stream_limits=StreamLimits(per_token=settings.token_streams, total=settings.max_streams),
        housekeeper=Housekeeper(queue, settings),
    )
    supervisor.start("events", feed.run, interval_seconds=max(settings.poll_seconds, LISTENING_POLL_SECONDS))
    supervisor.start("tokens", tokens.run, interval_seconds=settings.token_check_seconds)
    supervisor.start("memory", keep_trimmed, interval_seconds=TRIM_SECONDS)
    supervisor.start("housekeeping", service.housekeeper.run, interval_seconds=settings.waiting_check_seconds)
    if settings.log_dir is not None:
        supervisor.start("logs", LogFolder(database, settings.log_dir).run, interval_seconds=WRITE_SECONDS)
    try:
        yield service
    finally:
        feed.close()
        await supervisor.close()
        database.dispose()


async def service_of(request: Request) -> Service:
    """Return the service of the application that answers `request`. Routes depend on this.

    It is `async`, like other dependencies that only look something up: FastAPI calls the rest in threads.
    """
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(service_of)]


def body_text(max_bytes: int | None = None) -> Callable[[Request, ServiceDep], Awaitable[str]]:
    """Return a dependency that reads a request's body of at most `max_bytes`, by default those of the settings."""

    async def read(request: Request, service: ServiceDep) -> str:
        settings = service.settings
        return await read_text(request, max_bytes or settings.max_body_bytes, settings.body_seconds)

    return read


async def refuse_changes_if_outdated(request: Request, service: ServiceDep) -> None:
    """Refuse a request that may change something while the database has the schema of a later version.

    Raises:
        NewerSchemaError: the last round of housekeeping has seen such a schema.
    """
    if service.housekeeper.is_outdated and request.method not in {"GET", "HEAD"}:
        raise NewerSchemaError
