"""The work that one of several API processes does for all of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
import sqlalchemy as sa

from bexp.api import background
from bexp.api.background import Housekeeper
from bexp.api.settings import ServiceSettings
from bexp.explorer.records.event import EventCode
from bexp.storage.audit import KEEP_AUDIT, read_audit
from bexp.storage.database import Database
from bexp.storage.events import read_events
from bexp.storage.jobs import JobFilter, JobState, list_jobs
from bexp.storage.leaders import HOUSEKEEPER, hold_role
from bexp.storage.queue import Queue
from bexp.storage.schema import NewerSchemaError
from bexp.storage.tables import audit, jobs, leaders
from tests.api.serving import in_process
from tests.contracts.samples import make_request
from tests.waits import wait_until


def test_one_process_notes_why_a_job_waits_and_another_takes_over(settings: ServiceSettings, queue: Queue) -> None:
    job, _ = queue.enqueue(make_request())
    with queue.database.begin() as connection:
        connection.execute(sa.update(jobs).values(queued_at=datetime.now(UTC) - timedelta(minutes=1)))
    first, second = (Housekeeper(queue, settings) for _ in range(2))
    assert [first.work(), second.work(), first.work()] == [True, False, True]
    with queue.database.begin() as connection:  # the first has died
        connection.execute(sa.update(leaders).values(expires_at=datetime.now(UTC)))
    assert [second.work(), first.work()] == [True, False]
    notes = [event for event in read_events(queue.database, job.id) if event.code is EventCode.WAITING]
    assert len(notes) == 1


def test_a_process_that_ends_leaves_the_role_to_the_next(settings: ServiceSettings, sqlite_database: Database) -> None:
    def is_held() -> bool:
        with sqlite_database.read() as connection:
            return connection.execute(sa.select(leaders)).first() is not None

    with in_process(settings):
        wait_until(is_held)
        assert not hold_role(sqlite_database, HOUSEKEEPER, "next", background.TERM)
    assert hold_role(sqlite_database, HOUSEKEEPER, "next", background.TERM)


def test_retention_deletes_in_small_rounds_what_is_old_or_too_much(
    settings: ServiceSettings, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "MOST_PRUNED", 1)
    for _ in range(4):
        queue.request_cancel(queue.enqueue(make_request())[0].id)
    queue.enqueue(make_request())
    Housekeeper(queue, settings).work()
    assert len(list_jobs(queue.database)[0]) == 5
    keeper = Housekeeper(queue, replace(settings, keep_days=1.0, keep_jobs=2))
    with queue.database.begin() as connection:
        connection.execute(sa.delete(leaders))
    counts = []
    for _ in range(3):
        keeper.work()
        counts.append(len(list_jobs(queue.database)[0]))
    assert counts == [4, 3, 3]
    assert len(list_jobs(queue.database, JobFilter(state=JobState.QUEUED))[0]) == 1


def test_old_records_of_the_audit_are_deleted_without_being_asked(
    settings: ServiceSettings, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "MOST_PRUNED", 2)
    for _ in range(4):
        queue.enqueue(make_request())
    first, *_, last = reversed(read_audit(queue.database))
    with queue.database.begin() as connection:
        old = queue.database.clock(-KEEP_AUDIT - timedelta(days=1))
        connection.execute(sa.update(audit).where(audit.c.id != last.id).values(at=old))
    keeper = Housekeeper(queue, settings)
    counts = []
    for _ in range(3):
        keeper.work()
        counts.append([record.id for record in read_audit(queue.database)])
    assert first.id not in counts[0]
    assert [len(ids) for ids in counts] == [2, 1, 1]
    assert counts[-1] == [last.id]


@pytest.mark.parametrize("keep_days", [None, 30.0])
def test_it_looks_for_what_is_old_every_five_minutes_and_at_once_while_there_is_more(
    settings: ServiceSettings, queue: Queue, monkeypatch: pytest.MonkeyPatch, keep_days: float | None
) -> None:
    clock = SimpleNamespace(now=1000.0)
    clock.monotonic = lambda: clock.now
    found, asked = [200, 200, 3, 7, 1], list[float]()

    def prune_audit(_: Database, *, at_most: int) -> int:
        assert at_most == 200
        asked.append(clock.now)
        return found.pop(0)

    monkeypatch.setattr(background, "time", clock)
    monkeypatch.setattr(background, "prune_audit", prune_audit)
    keeper = Housekeeper(queue, replace(settings, keep_days=keep_days))
    for clock.now in (1000.0, 1002.0, 1004.0, 1006.0, 1303.9, 1304.0, 1306.0):
        assert keeper.work()
    assert asked == [1000.0, 1002.0, 1004.0, 1304.0]


def test_a_housekeeper_goes_on_after_what_the_database_refuses(
    settings: ServiceSettings, queue: Queue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    away = sa.exc.OperationalError("SELECT", {}, Exception("it is away"))
    faults, beats = [NewerSchemaError(), away], list[None]()
    keeper = Housekeeper(queue, replace(settings, waiting_check_seconds=0.0))

    def work() -> bool:
        if faults:
            raise faults.pop()
        return True

    def give_up(*_: object) -> None:
        raise away

    monkeypatch.setattr(keeper, "work", work)
    monkeypatch.setattr(keeper, "_is_elected", True)
    monkeypatch.setattr(background, "give_up_role", give_up)

    async def run() -> None:
        task = asyncio.create_task(keeper.run(lambda: beats.append(None)))
        while len(beats) < 2:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    first, second = caplog.messages
    assert first == "the database does not answer: it is away"
    assert second.startswith("the service takes no changes: ")
