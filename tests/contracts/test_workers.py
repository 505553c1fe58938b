from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import sqlalchemy as sa

from bexp.storage.database import Database
from bexp.storage.tables import workers
from bexp.storage.workers import WorkerInfo, WorkerState, forget_worker, read_workers, register_worker, select_live
from tests.contracts.samples import make_worker

WORKER = make_worker("host-1-cpu", targets={"bexp": "0.1.0", "transformers": "5.23.0"})


def live_workers(database: Database) -> list[WorkerInfo]:
    with database.read() as connection:
        return select_live(database, connection)


def age(database: Database, by: timedelta) -> None:
    with database.begin() as connection:
        connection.execute(sa.update(workers).values(last_seen_at=database.clock(-by)))


def test_a_worker_lives_as_long_as_it_says_so(database: Database) -> None:
    register_worker(database, WORKER)
    assert live_workers(database) == [WORKER]
    age(database, timedelta(minutes=1))
    assert live_workers(database) == []
    register_worker(database, WORKER)
    assert live_workers(database) == [WORKER]
    forget_worker(database, WORKER.id)
    assert read_workers(database) == []


def test_a_worker_waits_until_it_has_its_device(database: Database) -> None:
    def states() -> list[tuple[WorkerState, str | None]]:
        return [(known.state, known.info.held_by) for known in read_workers(database)]

    waiting = replace(WORKER, held_by="another", device_name="", fingerprint="", memory_limit_bytes=0)
    register_worker(database, waiting)
    started_at = read_workers(database)[0].started_at
    assert states() == [(WorkerState.WAITING, "another")]
    age(database, timedelta(minutes=1))
    assert states() == [(WorkerState.LOST, "another")]
    register_worker(database, WORKER)
    assert states() == [(WorkerState.IDLE, None)]
    (known,) = read_workers(database)
    assert (known.info, known.started_at) == (WORKER, started_at)


def test_registering_again_replaces_and_drops_the_long_dead(database: Database) -> None:
    register_worker(database, WORKER)
    register_worker(database, WORKER)
    age(database, timedelta(days=2))
    other = make_worker("host-2-cpu", pid=2, targets={})
    register_worker(database, other)
    assert [worker.info for worker in read_workers(database)] == [other]
