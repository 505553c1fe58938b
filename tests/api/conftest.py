"""An application on a fresh database, called in process or served on a port."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
from fastapi.testclient import TestClient

from bexp.api.app import create_app
from bexp.api.settings import ServiceSettings
from bexp.storage.database import Database
from bexp.storage.jobs import Job
from bexp.storage.leases import Lease
from bexp.storage.queue import Queue
from tests.api.serving import Served, in_process, start
from tests.contracts.samples import make_report, make_request, make_worker
from tests.waits import PATIENCE_SECONDS


@pytest.fixture
def settings(sqlite_url: str) -> ServiceSettings:
    return ServiceSettings(
        sqlite_url,
        poll_seconds=0.02,
        waiting_check_seconds=60.0,
        token_check_seconds=0.02,
        header_seconds=PATIENCE_SECONDS,  # the host may be busy with other programs
        body_seconds=PATIENCE_SECONDS,
    )


@pytest.fixture
def client(settings: ServiceSettings) -> Iterator[TestClient]:
    with in_process(settings, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def guarded(settings: ServiceSettings) -> Iterator[TestClient]:
    """An application that other machines reach, under whatever name."""
    app = create_app(replace(settings, require_token=True))
    with TestClient(app, base_url="http://bexp.example.org", raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def queue(sqlite_database: Database) -> Queue:
    """The queue behind the application, as a worker sees it."""
    return Queue(sqlite_database)


@pytest.fixture
def job(queue: Queue) -> Job:
    return queue.enqueue(make_request())[0]


@pytest.fixture
def lease(queue: Queue, job: Job) -> Lease:
    """The job, taken by a worker."""
    report = make_report()
    claim = queue.claim(make_worker("worker-1", fingerprint=report.hardware.fingerprint))
    assert claim is not None
    assert claim.job.id == job.id
    queue.pin(claim.lease, report)
    return claim.lease


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """What a test opens, closed at its end."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def serve() -> Iterator[Callable[[ServiceSettings], Served]]:
    running: list[Served] = []

    def start_one(settings: ServiceSettings) -> Served:
        running.append(start(settings))
        return running[-1]

    yield start_one
    for served in running:
        served.stop()


@pytest.fixture
def served(serve: Callable[[ServiceSettings], Served], settings: ServiceSettings) -> Served:
    return serve(settings)
