from __future__ import annotations

from datetime import timedelta

import sqlalchemy as sa

from bexp.api.embedded_api import is_settled
from bexp.storage.database import Database
from bexp.storage.jobs import JobState, get_job
from bexp.storage.queue import Queue
from bexp.storage.tables import workers
from bexp.storage.workers import WorkerInfo, forget_worker, list_workers, register_worker, worker_heartbeat
from tests.contracts.samples import make_request

WORKER = WorkerInfo("host-1-cpu", "host", 1, "cpu", "A device", 1, "f", {"bexp": "0.1.0", "transformers": "5.23.0"})


def age(database: Database, by: timedelta) -> None:
    with database.begin() as connection:
        connection.execute(sa.update(workers).values(last_seen_at=database.clock(-by)))


def test_a_worker_lives_as_long_as_it_says_so(database: Database) -> None:
    register_worker(database, WORKER)
    assert [worker.info for worker in list_workers(database)] == [WORKER]
    age(database, timedelta(minutes=1))
    assert list_workers(database) == []
    assert worker_heartbeat(database, WORKER.id)
    assert [worker.info for worker in list_workers(database)] == [WORKER]
    forget_worker(database, WORKER.id)
    assert list_workers(database, live_within=timedelta(hours=1)) == []
    assert not worker_heartbeat(database, WORKER.id)


def test_registering_again_replaces_and_drops_the_long_dead(database: Database) -> None:
    register_worker(database, WORKER)
    register_worker(database, WORKER)
    age(database, timedelta(days=2))
    other = WorkerInfo("host-2-cpu", "host", 2, "cpu", "A device", 1, "f")
    register_worker(database, other)
    assert [worker.info for worker in list_workers(database, live_within=timedelta(days=9))] == [other]


def test_what_another_worker_runs_outlives_a_command_that_only_joined_it(database: Database) -> None:
    queue = Queue(database)
    register_worker(database, WORKER)
    job, _ = queue.enqueue(make_request())
    assert queue.claim(WORKER.id, device_kind="cpu", num_devices=1, fingerprint="f") is not None
    assert is_settled(queue, job.id, "host-2-")
    assert get_job(database, job.id).cancel_requested is False
    assert not is_settled(queue, job.id, "host-1-")  # its own worker has to see the request first
    assert get_job(database, job.id).cancel_requested is True
    age(database, timedelta(minutes=1))  # a worker that died runs nothing
    assert not is_settled(queue, job.id, "host-2-")
    assert get_job(database, job.id).state is JobState.RUNNING
