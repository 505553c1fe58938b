"""Times are the database's: the clock of a worker or an API process may be an hour ahead of it, or behind."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, Self

import pytest

from bexp.storage.database import Database
from bexp.storage.jobs import JobState, get_job
from bexp.storage.leaders import HOUSEKEEPER, hold_role
from bexp.storage.owners import LOCAL
from bexp.storage.pruning import find_prunable
from bexp.storage.queue import Queue
from bexp.storage.queue_settings import QueueSettings
from bexp.storage.tokens import create_token, verify_token
from bexp.storage.workers import read_workers, register_worker
from tests.contracts.jobs import claim_next, claim_one, expire
from tests.contracts.samples import make_progress, make_request, make_worker

HALF_AN_HOUR = timedelta(minutes=30)


@pytest.fixture(params=[timedelta(hours=1), timedelta(hours=-1)], ids=["ahead", "behind"])
def set_clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Sets the clock that this process reads by `datetime` and `time`; that of the database stays."""
    shift: timedelta = request.param

    class Shifted(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Self:
            return super().now(tz) + shift

    def shift_all() -> None:
        for name, module in list(sys.modules.items()):
            if name.startswith("bexp.") and getattr(module, "datetime", None) is datetime:
                monkeypatch.setattr(module, "datetime", Shifted)
        real = __import__("time")
        shifted = SimpleNamespace(**vars(real) | {"time": lambda: real.time() + shift.total_seconds()})
        for name, module in list(sys.modules.items()):
            if name.startswith("bexp.") and getattr(module, "time", None) is real:
                monkeypatch.setattr(module, "time", shifted)

    return shift_all


@pytest.fixture
def postgresql(open_url: Callable[[str], Database], postgresql_url: str) -> Database:
    """A database with a clock of its own; that of SQLite is its host's."""
    return open_url(postgresql_url)


def test_leases_and_pauses(postgresql: Database, set_clock: Callable[[], None]) -> None:
    pause = QueueSettings(retry_pause=timedelta(minutes=1))
    queue, skewed = Queue(postgresql, pause), Queue(postgresql, pause)
    job, _ = queue.enqueue(make_request())
    mine = claim_one(queue, "a")
    set_clock()
    assert claim_next(skewed, "b") is None, "the lease holds"
    skewed.record(mine.lease, make_progress(0))
    skewed.heartbeat(mine.lease)
    assert claim_next(skewed, "b") is None, "it was extended"
    skewed.note_waiting()
    assert get_job(postgresql, job.id).state is JobState.RUNNING
    expire(postgresql, job.id)
    other = claim_one(skewed, "b")
    skewed.release(other.lease, trouble="the device is gone")
    assert claim_next(skewed, "c") is None, "the pause has begun"
    assert get_job(postgresql, job.id).state is JobState.QUEUED


def test_deadlines(postgresql: Database, set_clock: Callable[[], None]) -> None:
    queue = Queue(postgresql)
    set_clock()
    job, _ = queue.enqueue(make_request(), idempotency_key="k")
    assert abs(job.created_at - datetime.now(UTC)) < timedelta(minutes=1)
    for _ in range(2):
        queue.note_waiting(grace=timedelta(0), live_within=timedelta(0), max_wait=HALF_AN_HOUR)
    assert get_job(postgresql, job.id).waiting_reason == "none is running"
    assert queue.enqueue(make_request(), idempotency_key="k")[0].id == job.id
    queue.request_cancel(job.id)
    assert find_prunable(postgresql, older_than=HALF_AN_HOUR) == []
    assert find_prunable(postgresql, older_than=timedelta(0)) == [job.id]


def test_workers_and_roles(postgresql: Database, set_clock: Callable[[], None]) -> None:
    register_worker(postgresql, make_worker("straight"))
    assert hold_role(postgresql, HOUSEKEEPER, "straight", timedelta(seconds=10))
    set_clock()
    register_worker(postgresql, make_worker("skewed"))
    register_worker(postgresql, make_worker("skewed"))
    live = read_workers(postgresql)
    assert [worker.info.id for worker in live] == ["skewed", "straight"]
    assert all(abs(worker.last_seen_at - datetime.now(UTC)) < timedelta(minutes=1) for worker in live)
    assert not hold_role(postgresql, HOUSEKEEPER, "skewed", timedelta(seconds=10))


def test_tokens(postgresql: Database, set_clock: Callable[[], None]) -> None:
    lifetimes = {"valid": HALF_AN_HOUR, "expired": -HALF_AN_HOUR, "unlimited": None}
    set_clock()
    for name, lifetime in lifetimes.items():
        token = verify_token(postgresql, create_token(postgresql, name, lifetime=lifetime, by=LOCAL))
        assert token is not None
        assert token.has_expired == (name == "expired")
