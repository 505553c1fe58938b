"""The resources that the routes of one application share: database, queue, event feed and metrics."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import Depends, Request
from sqlalchemy.exc import SQLAlchemyError

from api.background import Beat, Supervisor
from api.metrics import Metrics
from api.rate_limits import RateLimiter
from api.settings import ServiceSettings
from api.streams import EventFeed
from api.tokens import Tokens
from storage.database import Database, DatabaseLimits, open_database
from storage.probe import try_write
from storage.queue import Queue

logger = logging.getLogger(__name__)


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
    tokens = Tokens(database, feed, check_seconds=settings.token_check_seconds)
    service = Service(
        settings,
        database,
        Queue(database),
        feed,
        metrics,
        supervisor,
        WriteProbe(database),
        tokens,
        token_limiter=RateLimiter(settings.token_rate),
        address_limiter=RateLimiter(settings.address_rate),
    )
    supervisor.start("events", feed.run, interval_seconds=settings.poll_seconds)
    supervisor.start("tokens", tokens.run, interval_seconds=settings.token_check_seconds)
    supervisor.start("waiting", partial(_note_waiting, service), interval_seconds=settings.waiting_check_seconds)
    try:
        yield service
    finally:
        feed.close()
        await supervisor.close()
        database.dispose()


def service_of(request: Request) -> Service:
    """Return the service of the application that answers `request`. Routes depend on this."""
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(service_of)]


async def _note_waiting(service: Service, beat: Beat) -> None:
    """Write into the log of each job that no worker can take, whenever the reason changes."""
    max_wait = timedelta(seconds=service.settings.max_wait_seconds)
    while True:
        try:
            await run_sync(partial(service.queue.note_waiting, max_wait=max_wait))
            beat()
        except SQLAlchemyError as error:
            logger.warning("the database does not answer: %s", getattr(error, "orig", error))
        await asyncio.sleep(service.settings.waiting_check_seconds)
