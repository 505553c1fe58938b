"""The resources that the routes of one application share: database, queue, event feed and metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import Depends, Request
from sqlalchemy.exc import DBAPIError

from api.metrics import Metrics
from api.settings import ServiceSettings
from api.streams import EventFeed
from storage.database import Database, open_database
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


@asynccontextmanager
async def run_service(settings: ServiceSettings, metrics: Metrics) -> AsyncIterator[Service]:
    """Open what the service needs and keep its background work going."""
    database = open_database(settings.database_url)
    feed = EventFeed(database, poll_seconds=settings.poll_seconds, keep_alive_seconds=settings.keep_alive_seconds)
    service = Service(settings, database, Queue(database), feed, metrics)
    tasks = [asyncio.create_task(feed.run()), asyncio.create_task(_note_waiting(service))]
    for task in tasks:
        task.add_done_callback(_report_fault)
    try:
        yield service
    finally:
        feed.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        database.dispose()


def service_of(request: Request) -> Service:
    """Return the service of the application that answers `request`. Routes depend on this."""
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(service_of)]


async def _note_waiting(service: Service) -> None:
    """Write into the log of each job that no worker can take, whenever the reason changes."""
    while True:
        try:
            await run_sync(service.queue.note_waiting)
        except DBAPIError as error:
            logger.warning("the database does not answer: %s", error.orig)
        await asyncio.sleep(service.settings.waiting_check_seconds)


def _report_fault(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("background work of the service ended", exc_info=error)
