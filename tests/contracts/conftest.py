"""A queue on each database, and a job in it."""

from __future__ import annotations

import pytest

from bexp.storage.database import Database
from bexp.storage.jobs import Job
from bexp.storage.queue import Queue
from tests.contracts.samples import make_request


@pytest.fixture
def queue(database: Database) -> Queue:
    return Queue(database)


@pytest.fixture
def job(queue: Queue) -> Job:
    """A job that no worker has taken, the first of the queue."""
    return queue.enqueue(make_request())[0]
