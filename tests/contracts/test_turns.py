"""Turns between owners, priorities and quotas, on both databases."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier
from typing import Any

import pytest
import sqlalchemy as sa

from bexp.explorer.records.event import EventCode
from bexp.storage import submission
from bexp.storage.audit import Action, note_action, read_audit
from bexp.storage.database import Database, DatabaseLimits, open_database
from bexp.storage.events import read_events
from bexp.storage.jobs import JobState, get_job
from bexp.storage.leases import Claim
from bexp.storage.owners import USUAL_SCOPES, Caller
from bexp.storage.queue import Queue
from bexp.storage.quotas import EVERYBODY, QueuedQuotaError, Quota, list_quotas, set_quota
from bexp.storage.tables import jobs
from bexp.storage.waiting import BUSY
from bexp.storage.workers import register_worker
from tests.contracts.samples import make_request, make_worker

MANY = 1000


def caller(owner: str) -> Caller:
    return Caller(owner, USUAL_SCOPES, f"token of {owner}", "10.0.0.1")


def submit(queue: Queue, owner: str, priority: int = 0) -> str:
    return queue.enqueue(make_request(), by=caller(owner), priority=priority)[0].id


def claim(queue: Queue, worker: str = "w") -> Claim | None:
    return queue.claim(make_worker(worker))


def claim_owner(queue: Queue) -> tuple[str, Claim]:
    found = claim(queue)
    assert found is not None
    return found.job.owner, found


def copy_job(database: Database, job_id: str, times: int) -> None:
    """Store more jobs like this one."""
    with database.begin() as connection:
        row = dict(connection.execute(sa.select(jobs).where(jobs.c.id == job_id)).one()._mapping)
        connection.execute(sa.insert(jobs), [row | {"id": secrets.token_hex(8)} for _ in range(times)])


def test_an_owner_with_a_thousand_queued_jobs_does_not_starve_another(database: Database, queue: Queue) -> None:
    copy_job(database, submit(queue, "greedy"), MANY - 1)
    assert claim_owner(queue)[0] == "greedy"
    for _ in range(3):
        submit(queue, "modest")
    taken = []
    for _ in range(8):
        owner, found = claim_owner(queue)
        taken.append(owner)
        queue.finish(found.lease, JobState.FAILED)
    # The first claim still runs, so that "modest" holds less whenever it has nothing running.
    assert taken == ["modest"] * 3 + ["greedy"] * 5


def test_owners_take_turns_on_one_worker(queue: Queue) -> None:
    for owner in "aabbcc":
        submit(queue, owner)
    taken = []
    for _ in range(6):
        owner, found = claim_owner(queue)
        taken.append(owner)
        queue.finish(found.lease, JobState.FAILED)
    assert taken == ["a", "b", "c"] * 2


def test_the_priority_orders_the_jobs_of_one_owner_alone(queue: Queue) -> None:
    usual, low, high = (submit(queue, "a", priority) for priority in (0, -1, 5))
    other = submit(queue, "b", 0)
    taken = []
    for _ in range(4):
        found = claim(queue)
        assert found is not None
        taken.append(found.job.id)
        queue.finish(found.lease, JobState.FAILED)
    assert taken == [high, other, usual, low]


def test_the_queued_quota_refuses_and_others_are_not_affected(database: Database, queue: Queue) -> None:
    set_quota(database, "a", Quota(max_queued=2))
    submit(queue, "a")
    first, is_new = queue.enqueue(make_request(), by=caller("a"), idempotency_key="k")
    assert is_new
    with pytest.raises(QueuedQuotaError) as refused:
        submit(queue, "a")
    assert (refused.value.owner, refused.value.limit) == ("a", 2)
    assert queue.enqueue(make_request(), by=caller("a"), idempotency_key="k")[0].id == first.id
    submit(queue, "b")
    assert claim(queue) is not None  # a job that runs is not queued
    submit(queue, "a")
    set_quota(database, EVERYBODY, Quota(max_queued=1))
    with pytest.raises(QueuedQuotaError):
        submit(queue, "b")
    set_quota(database, "b", Quota(max_queued=5))
    submit(queue, "b")
    set_quota(database, EVERYBODY, None)
    assert list_quotas(database) == {"a": Quota(max_queued=2), "b": Quota(max_queued=5)}
    assert {record.action for record in read_audit(database, owner="local")} == {Action.SET_QUOTA}


def test_two_submissions_at_once_do_not_both_take_the_last_place(database: Database, queue: Queue) -> None:
    set_quota(database, EVERYBODY, Quota(max_queued=3))

    def try_to(_: int) -> bool:
        try:
            submit(queue, "a")
        except QueuedQuotaError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(try_to, range(12))) == 3


def test_quotas_that_are_set_at_once_follow_each_other(database: Database) -> None:
    """One of them holds as a whole, and each is noted."""
    owners = [f"owner-{number}" for number in range(10)]
    with ThreadPoolExecutor(4) as pool:
        for owner in owners:
            list(pool.map(lambda n, of=owner: set_quota(database, of, Quota(n, n + 10, n + 20)), range(4)))
    stored = list_quotas(database)
    assert list(stored) == owners
    assert all(quota in [Quota(n, n + 10, n + 20) for n in range(4)] for quota in stored.values())
    assert [record.subject for record in read_audit(database)][::4] == owners[::-1]
    set_quota(database, "owner-0", Quota(max_running=1))
    assert list_quotas(database)["owner-0"] == Quota(max_running=1), "what is not given is no longer limited"


def test_a_submission_waits_for_those_of_its_owner_alone(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    if not database.is_postgresql:
        pytest.skip("SQLite has one lock for all that write")
    set_quota(database, EVERYBODY, Quota(max_queued=2))
    impatient = open_database(database.url, DatabaseLimits(lock=timedelta(seconds=0.3)))

    def submit_others(*of_first: Any, **named: Any) -> None:
        monkeypatch.undo()
        submit(Queue(impatient), "b")
        with pytest.raises(sa.exc.OperationalError, match="lock timeout"):
            submit(Queue(impatient), "a")
        note_action(*of_first, **named)

    monkeypatch.setattr(submission, "note_action", submit_others)
    submit(Queue(database), "a")
    submit(Queue(impatient), "a")
    impatient.dispose()


def test_claims_at_once_keep_the_running_quota(database: Database, queue: Queue) -> None:
    set_quota(database, EVERYBODY, Quota(max_running=2))
    copy_job(database, submit(queue, "a"), 11)
    submit(queue, "b")
    with ThreadPoolExecutor(8) as pool:
        claims = [found for found in pool.map(lambda i: claim(queue, f"w{i}"), range(12)) if found is not None]
    assert sorted(found.job.owner for found in claims) == ["a", "a", "b"]
    assert claim(queue) is None
    mine = next(found for found in claims if found.job.owner == "a")
    queue.finish(mine.lease, JobState.FAILED)
    assert claim_owner(queue)[0] == "a"


def test_claims_at_once_serve_owners_in_turn(database: Database) -> None:
    queue, together = Queue(database), Barrier(6)
    copy_job(database, submit(queue, "a"), 5)
    copy_job(database, submit(queue, "b"), 5)

    def take(i: int) -> str:
        together.wait()
        found = claim(queue, f"w{i}")
        assert found is not None
        return found.job.owner

    with ThreadPoolExecutor(6) as pool:
        assert sorted(pool.map(take, range(6))) == ["a"] * 3 + ["b"] * 3


def jobs_of(database: Database, owner: str) -> list[str]:
    with database.read() as connection:
        return list(connection.scalars(sa.select(jobs.c.id).where(jobs.c.owner == owner)))


def test_a_job_that_its_quota_holds_back_says_so_once_and_never_fails_for_it(database: Database, queue: Queue) -> None:
    worker = make_worker("w", host="h")
    register_worker(database, worker)
    set_quota(database, "a", Quota(max_running=1))
    for _ in range(2):
        submit(queue, "a")
    waiting = submit(queue, "b")
    owner, found = claim_owner(queue)
    assert owner == "a"
    held = next(job for job in jobs_of(database, "a") if job != found.job.id)

    def note() -> None:
        queue.note_waiting(grace=timedelta(seconds=-1), max_wait=timedelta(seconds=-1))

    note()
    reason = "the quota of owner 'a': 1 running at a time"
    assert get_job(database, held).waiting_reason == reason
    assert get_job(database, waiting).waiting_reason == BUSY, "only its worker is not free"
    queue.finish(found.lease, JobState.FAILED)
    note()
    note()
    notes = [event.message for event in read_events(database, held) if event.code is EventCode.WAITING]
    assert notes == [f"Waiting: {reason}"]
    assert get_job(database, held).state is JobState.QUEUED
    set_quota(database, "a", Quota(max_running=0))
    note()
    assert get_job(database, held).waiting_reason == "the quota of owner 'a': 0 running at a time"
    set_quota(database, "a", None)
    note()
    assert get_job(database, held).waiting_reason is None
