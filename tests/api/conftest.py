"""An application on a fresh database, called in process or served on a port."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import uvicorn
from fastapi.testclient import TestClient

from bexp.api.app import create_app
from bexp.api.connections import ConnectionLimits, guarded_protocol
from bexp.api.serve import Server, bind
from bexp.api.settings import ServiceSettings
from bexp.storage.database import Database
from bexp.storage.jobs import Job
from bexp.storage.leases import Lease
from bexp.storage.queue import Queue
from tests.contracts.samples import make_report, make_request

GRACE_SECONDS = 100
"""How long a service that is told to stop waits for its clients. Far more than any test needs."""


@pytest.fixture
def settings(sqlite_url: str) -> ServiceSettings:
    return ServiceSettings(
        sqlite_url,
        poll_seconds=0.02,
        waiting_check_seconds=60.0,
        token_check_seconds=0.02,
        header_seconds=60.0,  # the host may be busy with other programs
        body_seconds=60.0,
        answer_seconds=60.0,
    )


@pytest.fixture
def client(settings: ServiceSettings) -> Iterator[TestClient]:
    with TestClient(create_app(settings), base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
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
    claim = queue.claim("worker-1", device_kind="cpu", num_devices=1, fingerprint=report.hardware.fingerprint)
    assert claim is not None
    assert claim.job.id == job.id
    queue.pin(claim.lease, report)
    return claim.lease


@dataclass
class Served:
    """An application on a port."""

    url: str
    server: Server
    thread: threading.Thread

    @property
    def num_watchers(self) -> int:
        number: int = self.server._app.state.service.feed.num_watchers
        return number

    def stop(self) -> float:
        """Shut down as on SIGTERM; return how many seconds that took."""
        start = time.monotonic()
        self.server.should_exit = True
        self.thread.join(2 * GRACE_SECONDS)
        assert not self.thread.is_alive()
        return time.monotonic() - start


@pytest.fixture
def serve() -> Iterator[Callable[[ServiceSettings], Served]]:
    running: list[Served] = []

    def start(settings: ServiceSettings) -> Served:
        ready = threading.Event()
        listener = bind("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        app = create_app(settings)
        protocol = guarded_protocol(ConnectionLimits(settings.max_connections, settings.header_seconds))
        config = uvicorn.Config(app, http=protocol, log_level="warning", timeout_graceful_shutdown=GRACE_SECONDS)
        server = Server(config, app, ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        running.append(Served(url, server, thread))
        assert ready.wait(60)
        return running[-1]

    yield start
    for served in running:
        served.stop()


@pytest.fixture
def served(serve: Callable[[ServiceSettings], Served], settings: ServiceSettings) -> Served:
    return serve(settings)


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Fail unless `condition` comes true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)
