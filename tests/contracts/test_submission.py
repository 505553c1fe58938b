"""Submitted jobs, and the keys that make a submission safe to repeat, on both databases."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa

from bexp.storage import submission
from bexp.storage.database import Database
from bexp.storage.jobs import list_jobs
from bexp.storage.queue import Queue
from bexp.storage.submission import IdempotencyConflictError
from bexp.storage.tables import jobs
from tests.contracts.jobs import codes
from tests.contracts.samples import make_request


def test_the_same_key_and_request_give_the_same_job(database: Database, queue: Queue) -> None:
    first, _ = queue.enqueue(make_request(), idempotency_key="k")
    again, is_new = queue.enqueue(make_request(), idempotency_key="k")
    assert (again.id, is_new) == (first.id, False)
    assert queue.enqueue(make_request(), idempotency_key="other")[1]
    with pytest.raises(IdempotencyConflictError) as caught:
        queue.enqueue(make_request(seed=1), idempotency_key="k")
    assert caught.value.job_id == first.id
    assert codes(database, first.id) == [101]


def test_an_idempotency_key_stands_for_its_request_also_after_an_upgrade(database: Database, queue: Queue) -> None:
    first, _ = queue.enqueue(make_request(notices=("noted by an earlier version",)), idempotency_key="k")
    earlier = make_request().model_dump(mode="json")
    del earlier["fresh"]  # a field that version did not have
    with database.begin() as connection:
        connection.execute(sa.update(jobs).values(request=earlier, body_hash="of fewer fields"))
    again, is_new = queue.enqueue(make_request(), idempotency_key="k")
    assert (again.id, is_new) == (first.id, False)
    with pytest.raises(IdempotencyConflictError):
        queue.enqueue(make_request(fresh=True), idempotency_key="k")
    with database.begin() as connection:
        connection.execute(sa.update(jobs).values(request={"model": 1}))
    with pytest.raises(IdempotencyConflictError):
        queue.enqueue(make_request(), idempotency_key="k")


def test_an_id_that_is_taken_is_refused_with_a_key_too(queue: Queue) -> None:
    taken, _ = queue.enqueue(make_request())
    for key in (None, "k"):
        with pytest.raises(sa.exc.IntegrityError):
            queue.enqueue(make_request(seed=1), idempotency_key=key, job_id=taken.id)


def test_a_key_whose_faster_job_is_deleted_meanwhile_makes_another(
    database: Database, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    faster, _ = queue.enqueue(make_request(), idempotency_key="k")
    find_first, read, seen = submission._find_first, database.read, []

    def late(*given: Any) -> Any:
        seen.append(given)
        return None if len(seen) == 1 else find_first(*given)

    def read_later() -> Any:
        with database.begin() as connection:
            connection.execute(sa.delete(jobs).where(jobs.c.id == faster.id))
        return read()

    monkeypatch.setattr(submission, "_find_first", late)
    monkeypatch.setattr(database, "read", read_later)
    job, is_new = queue.enqueue(make_request(), idempotency_key="k")
    assert is_new
    assert job.id != faster.id


def test_a_key_that_another_takes_meanwhile_stands_for_its_job(
    database: Database, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in "abcd":
        queue.enqueue(make_request(seed=2), idempotency_key=key)
    faster, _ = queue.enqueue(make_request(), idempotency_key="k")
    monkeypatch.setattr(submission, "_find_first", lambda *_: None)
    again, is_new = queue.enqueue(make_request(), idempotency_key="k")
    assert (again.id, is_new) == (faster.id, False)
    with pytest.raises(IdempotencyConflictError):
        queue.enqueue(make_request(seed=1), idempotency_key="k")
    with pytest.raises(sa.exc.IntegrityError):
        queue.enqueue(make_request(), job_id=faster.id)
    assert len(list_jobs(database)[0]) == 5


def test_a_key_makes_one_job_when_used_at_once(database: Database, queue: Queue) -> None:
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: queue.enqueue(make_request(), idempotency_key="k"), range(8)))
    assert len({job.id for job, _ in results}) == 1
    assert sum(is_new for _, is_new in results) == 1
    assert len(list_jobs(database)[0]) == 1
