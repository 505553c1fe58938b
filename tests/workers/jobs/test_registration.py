"""The entry of a worker in the list, while the worker and the database live and while they do not."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta

import pytest
import sqlalchemy as sa

from bexp.storage.database import Database
from bexp.storage.workers import WorkerInfo, forget_worker, read_workers, register_worker
from bexp.workers.jobs.worker import Registration
from tests.contracts.samples import make_worker
from tests.waits import Waits, wait_until

WORKER = make_worker("w")


def away() -> sa.exc.OperationalError:
    return sa.exc.OperationalError("UPDATE", {}, ConnectionError("refused\nIs it running?"))


def test_a_worker_is_listed_as_it_says_from_when_it_says_so(database: Database) -> None:
    with Registration(database) as registration:
        assert read_workers(database) == []
        registration.tell(replace(WORKER, held_by="cpu is in use"))
        (waiting,) = read_workers(database)
        assert waiting.info.held_by == "cpu is in use"
        registration.tell(WORKER)
        (idle,) = read_workers(database)
        assert (idle.info, idle.started_at) == (WORKER, waiting.started_at)
    assert read_workers(database) == []


def test_a_worker_reports_three_times_in_the_15_seconds_that_it_lives_without(sqlite_database: Database) -> None:
    registration = Registration(sqlite_database)
    registration._ended = Waits(3)
    with registration:
        registration._thread.join()
    assert registration._ended.seconds == [5.0] * 3
    assert registration._thread.daemon, "a process that ends does not wait for it"


def test_a_worker_that_cannot_leave_the_list_ends(
    sqlite_database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise away()

    monkeypatch.setattr("bexp.workers.jobs.worker.forget_worker", fail)
    with Registration(sqlite_database) as registration:
        registration.tell(WORKER)
    assert "worker w could not be removed from the list: refused" in caplog.text


def test_a_worker_that_was_taken_off_the_list_is_on_it_again_and_so_is_what_it_could_not_say(
    sqlite_database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("bexp.workers.jobs.worker.LIVE_WITHIN", timedelta(seconds=0.03))
    is_away = threading.Event()

    def register(database: Database, worker: WorkerInfo) -> None:
        if is_away.is_set():
            raise away()
        register_worker(database, worker)

    monkeypatch.setattr("bexp.workers.jobs.worker.register_worker", register)
    with Registration(sqlite_database) as registration:
        registration.tell(WORKER)
        forget_worker(sqlite_database, "w")
        wait_until(lambda: [known.info for known in read_workers(sqlite_database)] == [WORKER])
        is_away.set()
        registration.tell(replace(WORKER, held_by="cpu is in use"))
        wait_until(lambda: bool(caplog.messages))
        is_away.clear()
        wait_until(lambda: [known.info.held_by for known in read_workers(sqlite_database)] == ["cpu is in use"])
    assert caplog.messages[0] == "worker w could not report to the database: refused"
    assert read_workers(sqlite_database) == []
