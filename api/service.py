"""The resources that the routes of one application share: database, queue, event feed and metrics."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from bexp.api.background import Supervisor
from bexp.api.housekeeping import Housekeeper
from bexp.api.memory import TRIM_SECONDS, keep_trimmed
from bexp.api.metrics import Metrics
from bexp.api.rate_limits import RateLimiter
from bexp.api.settings import ServiceSettings
from bexp.api.stream_limits import StreamLimits
from bexp.api.streams import LISTENING_POLL_SECONDS, EventFeed
from bexp.api.tokens import Tokens
from bexp.storage.database import Database, DatabaseLimits, open_database
from bexp.storage.probe import try_write
from bexp.storage.queue import Queue
from bexp.storage.schema import NewerSchemaError


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
    """Tries a write, at most once a second, however often it is asked."""

    def __init__(self, database: Database, *, keep_seconds: float = 1.0) -> None:
        self._database = database
        self._keep_seconds = keep_seconds
        self._lock = threading.Lock()
        self._succeeded_at = -math.inf

    def check(self) -> None:
        """Raise sqlalchemy.exc.SQLAlchemyError if the database does not take a write."""
        with self._lock:
            if time.monotonic() - self._succeeded_at > self._keep_seconds:
                try_write(self._database)
                self._succeeded_at = time.monotonic()


@asynccontextmanager
async def run_service(settings: ServiceSettings, metrics: Metrics) -> AsyncIterator[Service]:
    """Open what the service needs and keep its background work going."""
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
    try:
        yield service
    finally:
        feed.close()
        await supervisor.close()
        database.dispose()


async def service_of(request: Request) -> Service:
    """Return the service of the application that answers `request`. Routes depend on this.

    Like other dependencies that only look something up, it is `async`: FastAPI calls others in a thread of their own.
    """
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(service_of)]


async def refuse_changes_if_outdated(request: Request, service: ServiceDep) -> None:
    """Refuse a request that may change something while the database has the schema of a later version.

    Raises:
        NewerSchemaError: it has, as the last round of housekeeping found.
    """
    if service.housekeeper.is_outdated and request.method not in {"GET", "HEAD"}:
        raise NewerSchemaError
