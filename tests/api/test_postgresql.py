"""What the API asks of PostgreSQL: it is told of events, and it opens no more connections than it promises."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import sqlalchemy as sa

from bexp.api import streams
from bexp.api.examples import REQUEST
from bexp.api.routes import explorations
from bexp.api.settings import ServiceSettings
from bexp.storage.database import Database, DatabaseLimits, open_database
from bexp.storage.events import read_last_seqs
from bexp.storage.jobs import JobState
from bexp.storage.queue import Queue
from tests.api.serving import in_process
from tests.contracts.samples import make_progress, make_report, make_request, make_worker
from tests.contracts.test_notifications import end_listeners
from tests.waits import PATIENCE_SECONDS, wait_until

LONG = 600.0  # longer than a test waits for anything


def test_a_stream_gets_events_without_polling_and_those_of_an_outage_of_its_notifications(
    postgresql_url: str, open_url: Callable[[str], Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    postgresql = open_url(postgresql_url)
    monkeypatch.setattr(streams, "LISTENING_POLL_SECONDS", LONG)
    work = Queue(postgresql)
    job, _ = work.enqueue(make_request())
    claim = work.claim(make_worker(fingerprint=make_report().hardware.fingerprint))
    assert claim is not None
    polled: list[list[str]] = []

    def count_polls(asked: Database, job_ids: list[str]) -> dict[str, int]:
        polled.append(job_ids)
        return read_last_seqs(asked, job_ids)

    def is_quiet() -> bool:
        before = len(polled)
        time.sleep(0.3)
        return len(polled) == before

    monkeypatch.setattr(streams, "read_last_seqs", count_polls)
    settings = ServiceSettings(postgresql.url, poll_seconds=0.05, waiting_check_seconds=LONG)
    with in_process(settings) as client:
        feed = client.app.state.service.feed  # type: ignore[attr-defined]  # of the application that the client holds
        texts: list[str] = []
        path = f"/v1/explorations/{job.id}/log?follow=true"
        reader = threading.Thread(target=lambda: texts.append(client.get(path).text))
        reader.start()
        wait_until(lambda: feed.num_watchers == 1)
        wait_until(is_quiet)
        work.record(claim.lease, make_progress(0))
        wait_until(lambda: feed._watches[job.id].last_seq == 3)
        wait_until(lambda: feed.num_watchers == 1)
        with monkeypatch.context() as silent:  # an event is written while nothing is told
            silent.setattr("bexp.storage.events.notify_events", lambda *_: None)
            work.record(claim.lease, make_progress(1))
        assert is_quiet()
        assert feed._watches[job.id].last_seq == 3
        assert end_listeners(postgresql) == 1
        wait_until(lambda: feed._watches[job.id].last_seq == 4)
        wait_until(lambda: feed.num_watchers == 1)
        work.request_cancel(job.id)
        work.finish(claim.lease, JobState.CANCELLED)
        reader.join(PATIENCE_SECONDS)
    assert texts[0].count("\n") == 5


def test_the_api_opens_no_more_connections_than_its_budget(
    postgresql_server: str, postgresql_url: str, open_url: Callable[[str], Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    observer = open_url(postgresql_server)
    query = sa.text("SELECT count(*) FROM pg_stat_activity WHERE datname = :name")
    name = sa.make_url(postgresql_url).database
    most = DatabaseLimits().max_connections
    counts: list[int] = []

    def count() -> int:
        with observer.read() as connection:
            counts.append(connection.scalar(query, {"name": name}) or 0)
        return counts[-1]

    def list_slowly(database: Database, **_: object) -> tuple[list[object], None]:
        with database.read():
            wait_until(lambda: count() == most or most in counts)
        return [], None

    monkeypatch.setattr(explorations, "list_jobs", list_slowly)
    monkeypatch.setattr("bexp.api.turns.AT_ONCE", 8)  # as of two addresses
    patient = timedelta(seconds=60)
    monkeypatch.setattr(
        "bexp.api.service.open_database", lambda url, limits: open_database(url, replace(limits, pool=patient))
    )
    with in_process(ServiceSettings(postgresql_url)) as client, ThreadPoolExecutor(40) as pool:
        statuses = set(pool.map(lambda _: client.get("/v1/explorations").status_code, range(80)))
    assert statuses == {200}
    assert max(counts) == most == 10


def test_a_submission_to_a_standby_that_takes_no_writes_is_told_to_come_back(
    postgresql_url: str, open_url: Callable[[str], Database]
) -> None:
    database = open_url(postgresql_url)
    with database.begin() as connection:
        name = connection.engine.url.database
        connection.exec_driver_sql(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    with in_process(ServiceSettings(postgresql_url)) as client:
        refused = client.post("/v1/explorations", json=REQUEST)
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) > 0
        assert client.get("/v1/explorations").json()["items"] == []
