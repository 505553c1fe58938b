"""The service while its background work or its database fails."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient

from bexp.api import streams, tokens
from bexp.api.background import Beat, Supervisor
from bexp.api.examples import REQUEST
from bexp.api.settings import ServiceSettings
from bexp.api.streams import EventFeed
from bexp.explorer.records.event import Event
from bexp.storage.database import Database, DatabaseLimits, open_database
from bexp.storage.jobs import Job
from bexp.storage.queue import Queue
from tests.api.problems import assert_problem
from tests.api.serving import in_process
from tests.waits import PATIENCE_SECONDS, wait_until

SHORT = DatabaseLimits(
    statement=timedelta(seconds=1), lock=timedelta(seconds=0.2), pool=timedelta(seconds=0.2), max_connections=2
)


def test_a_task_that_fails_or_ends_is_started_again_and_its_trouble_is_told() -> None:
    rounds: list[str | None] = []

    async def scenario() -> None:
        supervisor = Supervisor(restart_seconds=0.0)

        async def work(beat: Beat) -> None:
            rounds.append(supervisor.find_trouble())
            if len(rounds) == 1:
                raise sa.exc.TimeoutError
            if len(rounds) == 2:
                return
            beat()
            await asyncio.sleep(60)

        supervisor.start("work", work, interval_seconds=60.0)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(rounds) < 3:
                await asyncio.sleep(0)
        assert supervisor.find_trouble() is None
        await supervisor.close()

    asyncio.run(scenario())
    assert rounds == [
        None,
        "the background task 'work' failed: TimeoutError",
        "the background task 'work' failed: it ended",
    ]


def test_a_task_that_fails_when_it_is_cancelled_ends(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        supervisor, began = Supervisor(restart_seconds=0.0), asyncio.Event()

        async def work(_beat: Beat) -> None:
            began.set()
            try:
                await asyncio.sleep(PATIENCE_SECONDS)
            finally:
                raise RuntimeError

        supervisor.start("work", work, interval_seconds=60.0)
        await began.wait()
        await asyncio.wait_for(supervisor.close(), PATIENCE_SECONDS)

    asyncio.run(scenario())
    assert caplog.messages == ["the background task 'work' failed"]


@pytest.mark.parametrize(
    ("silence", "told"), [(10.9, None), (12.0, "the background task 'hang' has not finished a round for 12 s")]
)
def test_a_task_that_is_stuck_is_told(monkeypatch: pytest.MonkeyPatch, silence: float, told: str | None) -> None:
    async def scenario() -> str | None:
        supervisor = Supervisor()

        async def hang(_beat: Beat) -> None:
            await asyncio.sleep(60)

        supervisor.start("hang", hang, interval_seconds=1.0)
        now = time.monotonic()
        monkeypatch.setattr("bexp.api.background.time", SimpleNamespace(monotonic=lambda: now + silence))
        try:
            return supervisor.find_trouble()
        finally:
            monkeypatch.undo()
            await supervisor.close()

    assert asyncio.run(scenario()) == told


AWAY = sa.exc.OperationalError("SELECT", {}, Exception("it is away"))


def codes(events: Iterable[Event]) -> bytes:
    return " ".join(event.code.name for event in events).encode()


def test_a_stream_whose_events_cannot_be_read_ends(
    sqlite_database: Database, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AWAY

    async def read() -> list[object]:
        feed = EventFeed(sqlite_database, poll_seconds=60, keep_alive_seconds=60)
        pages: list[object] = [page async for page in feed.follow(job.id, 0, codes)]
        assert not feed._watches
        return pages

    monkeypatch.setattr(streams, "read_events", fail)
    assert asyncio.run(read()) == []


@pytest.mark.parametrize("is_away", [False, True])
def test_a_stream_has_an_event_with_nothing_before_it_or_ends_with_the_database(
    sqlite_database: Database, job: Job, monkeypatch: pytest.MonkeyPatch, is_away: bool
) -> None:
    def fail(*_: object) -> None:
        raise AWAY

    async def read() -> list[bytes]:
        feed = EventFeed(sqlite_database, poll_seconds=0.01, keep_alive_seconds=1000)
        task = asyncio.create_task(feed.run(lambda: None))
        pages: list[bytes] = []
        async for page in feed.follow(job.id, 0, codes):
            pages.append(page)
            if not is_away and len(pages) == 1:
                await asyncio.to_thread(Queue(sqlite_database).request_cancel, job.id)
        assert not task.done(), "it serves the next streams"
        task.cancel()
        return pages

    if is_away:
        monkeypatch.setattr(streams, "read_last_seqs", fail)
    expected = [b"QUEUED"] if is_away else [b"QUEUED", b"CANCELLED"]
    assert asyncio.run(asyncio.wait_for(read(), PATIENCE_SECONDS)) == expected


def test_streams_go_on_while_tokens_cannot_be_looked_up(
    sqlite_database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults, beats, woken = [AWAY], list[None](), list[set[str]]()

    def find(_: Database, digests: set[str]) -> set[str]:
        if faults:
            raise faults.pop()
        return digests if woken else set()

    monkeypatch.setattr(tokens, "find_revoked", find)
    feed: Any = SimpleNamespace(wake=woken.append)
    known = tokens.Tokens(sqlite_database, feed, check_seconds=0.0)

    async def run() -> None:
        with known.stream("secret", "job") as may_continue:
            task = asyncio.create_task(known.run(lambda: beats.append(None)))
            while may_continue():
                await asyncio.sleep(0)
            task.cancel()

    asyncio.run(run())
    assert (woken, len(beats)) == ([set(), {"job"}], 2)
    assert caplog.messages == ["the database does not answer: it is away"]


def test_ready_reports_a_background_task_that_failed(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client.get("/readyz").status_code == 200
    monkeypatch.setattr(Supervisor, "find_trouble", lambda _: "the background task 'events' failed: it ended")
    response = client.get("/readyz")
    assert_problem(response, 503)
    assert "'events'" in response.json()["detail"]


@pytest.fixture
def impatient(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """An application that does not wait long for a lock."""
    limits = DatabaseLimits(lock=SHORT.lock)
    monkeypatch.setattr("bexp.api.service.open_database", lambda url, _: open_database(url, limits))
    settings = ServiceSettings(sqlite_url, waiting_check_seconds=60.0)
    with in_process(settings, raise_server_exceptions=False) as client:
        yield client


def test_a_database_that_takes_no_writes_is_told_and_submissions_come_back_later(
    impatient: TestClient, sqlite_database: Database
) -> None:
    with sqlite_database.begin():  # holds the write lock
        ready = impatient.get("/readyz")
        assert_problem(ready, 503)
        assert "no writes" in ready.json()["detail"]
        assert ready.headers["Retry-After"]
        response = impatient.post("/v1/explorations", json=REQUEST)  # answered while the lock is held
        assert_problem(response, 503)
        assert 1 <= int(response.headers["Retry-After"]) <= 5
        assert impatient.get("/v1/explorations").status_code == 200
    wait_until(lambda: impatient.get("/readyz").status_code == 200)  # what was found holds for a second


def test_no_limit_on_waiting_is_above_what_is_promised() -> None:
    limits = DatabaseLimits()
    of_a_write = limits.turn + limits.lock  # on SQLite, one after the other
    each = (
        limits.connect,
        limits.statement,
        limits.pool,
        of_a_write,
        timedelta(seconds=ServiceSettings("").answer_seconds),
    )
    assert max(each) < timedelta(seconds=5)


def test_nobody_waits_for_a_host_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://a@127.0.0.1:{silent.getsockname()[1]}/b"
        database = open_database(url, DatabaseLimits(connect=timedelta(seconds=2)))
        with pytest.raises(sa.exc.OperationalError, match="timeout"), database.read():
            pass
        database.dispose()
