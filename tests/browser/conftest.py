"""One service behind a path prefix, one replaying worker, and one Chromium for all tests."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from bexp.api.app import create_app
from bexp.api.listener import Server, bind, url_of
from bexp.api.serve import end_streams
from bexp.api.settings import ServiceSettings
from bexp.client.client import Client
from bexp.explorer.records.measurement import Measurement
from bexp.explorer.records.trial import TrialTask
from bexp.storage.database import Database, open_database
from bexp.storage.jobs import list_jobs
from bexp.storage.queue import Queue
from bexp.storage.tokens import create_token
from bexp.workers.jobs.worker import JobWorker
from bexp.workers.replay.profiler import ReplayProfiler
from tests.browser.chromium import Chromium, find_chromium
from tests.simulated_tables import write
from tests.waits import PATIENCE_SECONDS, wait_until
from tests.workers.replay.samples import recording, request

TOKEN_CHECK_SECONDS = 0.1
PREFIX = "/team/bexp"


class GatedProfiler(ReplayProfiler):
    """Replays a table; a trial waits until `gate` is set."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.gate = threading.Event()
        self.gate.set()

    def measure(self, task: TrialTask) -> Measurement:
        assert self.gate.wait(PATIENCE_SECONDS)
        return super().measure(task)


@dataclass
class Service:
    """A running service with a finished exploration."""

    url: str
    token: str
    database: Database
    queue: Queue
    profiler: GatedProfiler
    client: Client
    finished: str

    def hold(self) -> None:
        """Have trials wait, once the only worker has ended what other tests have left to it."""
        wait_until(lambda: all(job.state.is_final for job in list_jobs(self.database)[0]))
        self.profiler.gate.clear()


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    executable = find_chromium()
    if executable is None:
        pytest.skip("no Chromium is installed here")
    with Chromium(executable, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="session")
def service(browser: Chromium, sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    shutil.copyfile(sqlite_template, folder / "bexp.db")
    settings = ServiceSettings(
        f"sqlite:///{folder / 'bexp.db'}",
        poll_seconds=0.02,
        answer_seconds=PATIENCE_SECONDS,
        require_token=True,
        token_check_seconds=TOKEN_CHECK_SECONDS,
    )
    database = open_database(settings.database_url)
    queue, token = Queue(database), create_token(database, "browser")
    write(recording(whole_model_share=1.0), folder / "table.jsonl")
    profiler = GatedProfiler(folder / "table.jsonl")
    worker = JobWorker(queue, profiler, "replay", max_poll_seconds=0.05)

    app = create_app(settings)

    async def prefixed(scope: Scope, receive: Receive, send: Send) -> None:
        """Pass requests on as a proxy that serves the application under a prefix does."""
        if scope["type"] == "http":
            scope = {**scope, "path": scope["path"].removeprefix(PREFIX) if PREFIX in scope["path"] else "/elsewhere"}
        await app(scope, receive, send)

    ready = threading.Event()
    listener = bind("127.0.0.1", 0)
    server = Server(prefixed, settings, on_ready=ready.set, on_shutdown=lambda: end_streams(app))
    url = f"{url_of('127.0.0.1', listener)}{PREFIX}"
    threads = [
        threading.Thread(target=server.run, args=([listener],), daemon=True),
        threading.Thread(target=worker.run, daemon=True),
    ]
    finished = queue.enqueue(request())[0].id
    for thread in threads:
        thread.start()
    assert ready.wait(PATIENCE_SECONDS)
    with Client(url, token) as client:
        assert list(client.events(finished))[-1].message
        yield Service(url, token, database, queue, profiler, client, finished)
    profiler.gate.set()
    worker.stop()
    server.should_exit = True
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
    database.dispose()
