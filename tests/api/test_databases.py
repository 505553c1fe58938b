"""One way through the service on each database, and what the API asks of PostgreSQL."""

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
from bexp.api.background import TERM
from bexp.api.examples import REQUEST
from bexp.api.routes import explorations
from bexp.api.settings import ServiceSettings
from bexp.storage.database import Database, DatabaseLimits, open_database
from bexp.storage.events import read_last_seqs
from bexp.storage.jobs import JobState
from bexp.storage.leaders import HOUSEKEEPER, hold_role
from bexp.storage.queue import Queue
from bexp.storage.schema import VERSION_TABLE, latest_revision
from bexp.storage.tables import leaders
from tests.api.problems import assert_problem
from tests.api.serving import in_process
from tests.contracts.samples import make_progress, make_report, make_request, make_worker
from tests.contracts.test_notifications import end_listeners
from tests.waits import PATIENCE_SECONDS, wait_until


def test_a_way_through_the_service(database_url: str, open_url: Callable[[str], Database]) -> None:
    queue = Queue(open_url(database_url))
    settings = ServiceSettings(database_url, poll_seconds=0.02)
    with in_process(settings, raise_server_exceptions=False) as client:
        assert client.get("/readyz").status_code == 200
        headers = {"Idempotency-Key": "once"}
        here = client.post("/v1/explorations", json=REQUEST, headers=headers).headers["Location"]
        assert client.post("/v1/explorations", json=REQUEST, headers=headers).headers["Location"] == here
        refused = client.post("/v1/explorations", json=REQUEST | {"seed": 1}, headers=headers)
        assert_problem(refused, 422)
        assert refused.json()["errors"][0]["field"] == "Idempotency-Key"
        client.post("/v1/explorations", json=REQUEST)

        fingerprint = make_report().hardware.fingerprint
        claim = queue.claim(make_worker("worker", fingerprint=fingerprint))
        assert claim is not None
        assert here.endswith(claim.job.id)
        queue.record(claim.lease, make_progress(0))
        queue.finish(claim.lease, JobState.SUCCEEDED)

        assert client.get(here).json()["state"] == "succeeded"
        assert client.get(f"{here}/recommendation").json()["recommendation"]["confidence"] == 45
        assert len(client.get(f"{here}/trials").json()["items"]) == 1
        assert client.get(f"{here}/events").text.count("\ndata: ") == 4
        assert client.get(f"{here}/log?follow=true").text.count("\n") == 4
        assert 'bexp_jobs{state="succeeded"} 1.0' in client.get("/metrics").text

        page = client.get("/v1/explorations?limit=1").json()
        last = client.get("/v1/explorations", params={"cursor": page["next_cursor"]}).json()
        assert [item["links"]["self"] for item in last["items"]] == [here]
        # PostgreSQL takes no NUL and no number beyond its columns.
        for path, status in [
            ("/v1/explorations/%00", 404),
            ("/v1/explorations?cursor=%00", 422),
            ("/v1/explorations?model=%00", 422),
            (f"/v1/explorations?model={'a' * 129}", 422),
            ("/v1/explorations?label=a%3D%00", 422),
            ("/v1/audit?owner=%00", 422),
            (f"/v1/audit?owner={'a' * 65}", 422),
            (f"/v1/audit?cursor={1 << 63}", 422),
            (f"/v1/audit?cursor={(1 << 63) - 1}", 200),
            (f"{here}/trials?cursor={1 << 31}", 422),
            (f"{here}/trials?cursor={(1 << 31) - 1}", 200),
            (f"{here}/log?after={1 << 31}", 422),
            (f"{here}/events?after={(1 << 31) - 1}", 204),
        ]:
            assert client.get(path).status_code == status, path
        for document in (REQUEST | {"model": REQUEST["model"] | {"name": "a\0b"}}, REQUEST | {"a\0b": 1}):
            assert client.post("/v1/explorations", json=document).status_code == 422


def test_a_service_takes_no_changes_after_a_later_version_has_upgraded_the_database(
    database_url: str, open_url: Callable[[str], Database]
) -> None:
    database = open_url(database_url)
    settings = ServiceSettings(database_url, waiting_check_seconds=0.02)
    with in_process(settings) as client:
        here = client.post("/v1/explorations", json=REQUEST).headers["Location"]
        with database.begin() as connection:
            connection.execute(sa.text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
            connection.execute(sa.delete(leaders))
        wait_until(lambda: client.post(f"{here}/cancel").status_code == 503)
        refused = client.post("/v1/explorations", json=REQUEST)
        assert_problem(refused, 503)
        assert refused.json()["type"] == "urn:bexp:problem:schema-not-current"
        assert client.get(here).status_code == client.get("/healthz").status_code == 200
        assert client.get("/readyz").status_code == 503
    assert hold_role(database, HOUSEKEEPER, "of the later version", TERM)


def test_a_service_is_not_ready_with_the_schema_of_an_earlier_version(
    database_url: str, open_url: Callable[[str], Database]
) -> None:
    database = open_url(database_url)
    with in_process(ServiceSettings(database_url)) as client:
        for revision, status in (("0000", 503), (f"{latest_revision()[:2]}99", 200), (latest_revision(), 200)):
            with database.begin() as connection:
                connection.execute(sa.text(f"UPDATE {VERSION_TABLE} SET version_num = '{revision}'"))
            assert client.get("/readyz").status_code == status, revision


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
