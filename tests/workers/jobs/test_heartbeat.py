from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import sqlalchemy as sa

from storage.database import Database
from storage.jobs import JobState, get_job
from storage.leases import Claim, HeartbeatStatus, Lease
from storage.queue import Queue
from storage.queue_settings import QueueSettings
from tests.contracts.samples import make_request
from workers.jobs.heartbeat import Interruption, LeaseHeartbeat

POLL = timedelta(milliseconds=20)


def claim(queue: Queue) -> Claim:
    queue.enqueue(make_request())
    found = queue.claim("a", device_kind="cpu", num_devices=1, fingerprint="f")
    assert found is not None
    return found


@contextmanager
def keeping(queue: Queue, lease: Lease) -> Iterator[tuple[LeaseHeartbeat, threading.Event]]:
    interrupted = threading.Event()
    with LeaseHeartbeat(queue, lease, interrupted.set, poll=POLL) as keeper:
        yield keeper, interrupted


def test_a_kept_lease_outlives_its_length(sqlite_database: Database) -> None:
    length = timedelta(seconds=2)  # a busy host may hold up a heartbeat for a second
    queue = Queue(sqlite_database, QueueSettings(lease=length))
    held = claim(queue)
    with keeping(queue, held.lease) as (keeper, interrupted):
        time.sleep(length.total_seconds() + 0.2)
        assert queue.claim("b", device_kind="cpu", num_devices=1, fingerprint="f") is None
        assert not interrupted.is_set()
    assert keeper.reason is None
    assert get_job(sqlite_database, held.job.id).state is JobState.RUNNING


def test_a_cancellation_interrupts(sqlite_database: Database) -> None:
    queue = Queue(sqlite_database)
    held = claim(queue)
    with keeping(queue, held.lease) as (keeper, interrupted):
        queue.request_cancel(held.job.id)
        assert interrupted.wait(60)
        assert keeper.reason is Interruption.CANCELLED


def test_a_lost_lease_interrupts(sqlite_database: Database) -> None:
    queue = Queue(sqlite_database)
    held = claim(queue)
    with keeping(queue, held.lease) as (keeper, interrupted):
        queue.release(held.lease)
        assert interrupted.wait(60)
        assert keeper.reason is Interruption.LEASE_LOST


def test_a_database_that_is_away_ends_nothing_and_a_lost_lease_is_noticed_afterwards(
    sqlite_database: Database,
) -> None:
    away = threading.Event()

    class Away(Queue):
        def heartbeat(self, lease: Lease) -> HeartbeatStatus:
            if away.is_set():
                raise sa.exc.OperationalError("UPDATE", {}, Exception("the server is gone"))
            return super().heartbeat(lease)

        watch = heartbeat

    queue = Away(sqlite_database, QueueSettings(lease=timedelta(seconds=0.3)))
    held = claim(queue)
    with keeping(queue, held.lease) as (keeper, interrupted):
        away.set()
        assert not interrupted.wait(1.0)
        assert Queue(sqlite_database).claim("b", device_kind="cpu", num_devices=1, fingerprint="f") is not None
        away.clear()
        assert interrupted.wait(60)
    assert keeper.reason is Interruption.LEASE_LOST
