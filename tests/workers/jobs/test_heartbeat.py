from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
import sqlalchemy as sa

from bexp.storage.database import Database
from bexp.storage.jobs import JobState, get_job
from bexp.storage.leases import Claim, HeartbeatStatus, Lease
from bexp.storage.queue import Queue
from bexp.storage.queue_settings import QueueSettings
from bexp.storage.tables import jobs
from bexp.workers.jobs import runner
from bexp.workers.jobs.runner import Interruption, LeaseHeartbeat
from tests.contracts.samples import make_request, make_worker
from tests.waits import PATIENCE_SECONDS, wait_until

POLL = timedelta(milliseconds=20)


def claim(queue: Queue) -> Claim:
    queue.enqueue(make_request())
    found = queue.claim(make_worker())
    assert found is not None
    return found


@contextmanager
def keeping(queue: Queue, lease: Lease) -> Iterator[tuple[LeaseHeartbeat, threading.Event]]:
    interrupted = threading.Event()
    with LeaseHeartbeat(queue, lease, interrupted.set, poll=POLL) as keeper:
        yield keeper, interrupted


def expiry(database: Database) -> datetime:
    """The end of the only job's lease."""
    with database.read() as connection:
        found: datetime = connection.execute(sa.select(jobs.c.lease_expires_at)).scalar_one()
    return found


def test_a_lease_is_extended_to_its_full_length_three_times_in_its_length(
    sqlite_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    length, now, asked = timedelta(seconds=60), 0.0, threading.Event()

    def monotonic() -> float:
        asked.set()
        return now

    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=monotonic))
    queue = Queue(sqlite_database, QueueSettings(lease=length))
    held = claim(queue)
    with keeping(queue, held.lease) as (keeper, interrupted):
        for seconds in (20.0, 20.5, 20.0, 45.0):
            before = expiry(sqlite_database)
            now += 19.5
            for _ in range(2):  # the first answer may be to the time before
                asked.clear()
                assert asked.wait(PATIENCE_SECONDS)
            assert expiry(sqlite_database) == before, "it is not time yet"
            now += seconds - 19.5
            wait_until(lambda before=before: expiry(sqlite_database) > before)  # type: ignore[misc]  # no type of its default
        assert expiry(sqlite_database) - datetime.now(UTC) > length / 2
        assert queue.claim(make_worker("b")) is None
        assert not interrupted.is_set()
        assert keeper._thread.daemon, "a process that ends does not wait for it"
    assert keeper.reason is None
    assert get_job(sqlite_database, held.job.id).state is JobState.RUNNING


def test_a_database_that_is_away_ends_nothing_and_a_lost_lease_is_noticed_afterwards(
    sqlite_database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    away = threading.Event()
    failures: list[Lease] = []

    class Away(Queue):
        def heartbeat(self, lease: Lease) -> HeartbeatStatus:
            if away.is_set():
                failures.append(lease)
                raise sa.exc.OperationalError("UPDATE", {}, Exception("the server\nis gone"))
            return super().heartbeat(lease)

        watch = heartbeat

    queue = Away(sqlite_database)
    held = claim(queue)
    with keeping(queue, held.lease) as (keeper, interrupted):
        away.set()
        wait_until(lambda: len(failures) > 5)
        assert not interrupted.is_set()
        told = f"the lease of {held.job.id} could not be extended: (builtins.Exception) the server"
        assert caplog.messages[0] == told
        with sqlite_database.begin() as connection:
            past = sqlite_database.clock(timedelta(seconds=-1))
            connection.execute(sa.update(jobs).values(lease_expires_at=past))
        assert Queue(sqlite_database).claim(make_worker("b")) is not None
        away.clear()
        assert interrupted.wait(PATIENCE_SECONDS)
    assert keeper.reason is Interruption.LEASE_LOST


def test_a_lease_that_ends_with_its_job_is_not_lost(sqlite_database: Database) -> None:
    queue = Queue(sqlite_database)
    held = claim(queue)

    def finish() -> None:
        queue.finish(held.lease, JobState.FAILED, error="none of it fits")
        time.sleep(5 * POLL.total_seconds())  # the thread would ask meanwhile

    with keeping(queue, held.lease) as (keeper, interrupted):
        keeper.end(finish)
        wait_until(lambda: not keeper._thread.is_alive())
    assert not interrupted.is_set()
    assert keeper.reason is None
