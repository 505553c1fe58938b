"""What an owner's jobs take is counted in time to refuse more than its quota."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import sqlalchemy as sa

from bexp.storage import quotas
from bexp.storage.audit import prune_most_recorded, read_audit
from bexp.storage.database import Database
from bexp.storage.jobs import JobState
from bexp.storage.owners import LOCAL, USUAL_SCOPES, Caller
from bexp.storage.pruning import prune
from bexp.storage.queue import Queue
from bexp.storage.quotas import (
    EVERYBODY,
    JOB_BYTES,
    ROW_BYTES,
    Quota,
    StoredQuotaError,
    StoredSums,
    set_quota,
    sum_stored_bytes,
)
from bexp.storage.run_reports import insert_run_report
from bexp.storage.tables import jobs
from tests.contracts.jobs import ANSWER, claim_one
from tests.contracts.samples import make_progress, make_request
from tests.contracts.test_run_reports import make as make_report

LOTS = 1 << 60


def count(database: Database, owner: str = LOCAL.owner) -> int:
    with database.begin() as connection:
        return sum_stored_bytes(database, connection, owner, LOTS)[0]


def texts(database: Database) -> int:
    """The bytes of all that is stored of jobs and may be long, as the database's own text of a row has them."""
    total = 0
    with database.read() as connection:
        for table in quotas._TEXTS:
            columns = [sa.cast(table.c[name], sa.Text) for name in quotas._TEXTS[table]]
            for row in connection.execute(sa.select(*columns)):
                total += sum(len(value.encode()) for value in row if value is not None)
                total += JOB_BYTES if table is jobs else ROW_BYTES
    return total


def test_all_that_belongs_to_a_job_is_counted(database: Database, queue: Queue) -> None:
    queue.enqueue(make_request(fresh=True, labels={"team": "größe"}))
    assert count(database) == texts(database)
    claim = claim_one(queue)
    for number in range(3):
        queue.record(claim.lease, make_progress(number))
    assert count(database) < texts(database), "what a running job writes is counted at its end"
    queue.finish(claim.lease, JobState.SUCCEEDED, answer=ANSWER)
    assert count(database) == texts(database)
    insert_run_report(database, claim.job.id, make_report())
    assert count(database) == texts(database)
    prune(database, [claim.job.id])
    assert count(database) == 0


def test_an_owner_that_stores_its_quota_adds_nothing_until_it_deletes(database: Database, queue: Queue) -> None:
    a, b = (Caller(name, USUAL_SCOPES) for name in "ab")
    one = [queue.enqueue(make_request(fresh=True), by=a)[0].id]
    queue.request_cancel(one[0])
    limit = 3 * count(database, "a") - 1
    set_quota(database, EVERYBODY, Quota(max_stored_bytes=limit))
    for _ in range(2):
        one.append(queue.enqueue(make_request(fresh=True), by=a)[0].id)
        queue.request_cancel(one[-1])
    with pytest.raises(StoredQuotaError) as refused:
        queue.enqueue(make_request(fresh=True), by=a)
    assert (refused.value.owner, refused.value.limit) == ("a", limit)
    assert refused.value.stored > limit
    with pytest.raises(StoredQuotaError):
        queue.resume(one[0])
    queue.enqueue(make_request(fresh=True), by=b)
    prune(database, one[:1])
    queue.enqueue(make_request(fresh=True), by=a)
    set_quota(database, "b", Quota(max_stored_bytes=count(database, "b")))  # no byte is left
    with pytest.raises(StoredQuotaError):
        queue.enqueue(make_request(fresh=True), by=b)


@pytest.mark.parametrize("in_turns", [True, False])
def test_processes_that_sum_seldom_exceed_the_quota_by_little_together(database: Database, in_turns: bool) -> None:
    queues = [Queue(database) for _ in range(8)]
    queues[0].enqueue(make_request(fresh=True))
    one = count(database)
    set_quota(database, EVERYBODY, Quota(max_stored_bytes=200 * one))
    for queue in queues:
        queue.enqueue(make_request(fresh=True))
    with patch.object(quotas, "sum_stored_bytes", wraps=sum_stored_bytes) as sums:
        for number in range(8 if not in_turns else 1):
            with pytest.raises(StoredQuotaError):
                for each in range(300):
                    queues[(number + each) % 8 if in_turns else number].enqueue(make_request(fresh=True))
            with pytest.raises(StoredQuotaError):
                queues[number].enqueue(make_request(fresh=True))
    assert sums.call_count < 180
    assert 200 <= count(database) / one < 200 * (1 + 7 / 64) + 1


def test_after_a_refusal_a_smaller_submission_needs_a_sum_as_well() -> None:
    sums = StoredSums()
    sums.note("a", stored=0, num_bytes=0)
    assert sums.has_room("a", 6400, 60)
    assert not sums.has_room("a", 6400, 60), "with what was accepted it is more than the share"
    assert not sums.has_room("a", 6400, 1)


def test_a_sum_is_too_old_after_a_while_and_void_with_another_quota(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, other = Queue(database), Queue(database)
    for _ in range(3):
        queue.enqueue(make_request(fresh=True))
    set_quota(database, EVERYBODY, Quota(max_stored_bytes=count(database)))
    with pytest.raises(StoredQuotaError):
        queue.enqueue(make_request(fresh=True))
    set_quota(database, EVERYBODY, Quota(max_stored_bytes=100 * count(database)))
    queue.enqueue(make_request(fresh=True))
    monkeypatch.setattr(quotas, "SHARE_OF_ROOM", 1.0)
    for _ in range(10):
        other.enqueue(make_request(fresh=True))
    set_quota(database, EVERYBODY, Quota(max_stored_bytes=count(database) - 1))
    queue.enqueue(make_request(fresh=True))  # by its own sum there is room
    monkeypatch.setattr(quotas, "SUM_SECONDS", 0.0)
    with pytest.raises(StoredQuotaError):
        queue.enqueue(make_request(fresh=True))


def test_reports_of_real_runs_and_reused_answers_count_as_well(
    database: Database, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.enqueue(make_request())
    claim = claim_one(queue)
    queue.record(claim.lease, make_progress(0))
    queue.finish(claim.lease, JobState.SUCCEEDED, answer=ANSWER)
    queue.enqueue(make_request(seed=1))
    total = count(database)
    insert_run_report(database, claim.job.id, make_report())
    with database.read() as connection:
        void = connection.scalars(sa.select(jobs.c.id).where(jobs.c.stored_bytes.is_(None))).all()
    assert list(void) == [claim.job.id], "the others are not counted anew"
    assert total < count(database) == texts(database)
    monkeypatch.setattr(quotas, "MAX_STORED_BYTES", 1000)  # without a quota
    with pytest.raises(StoredQuotaError):
        insert_run_report(database, claim.job.id, make_report())
    with pytest.raises(StoredQuotaError):
        queue.enqueue(make_request())


def test_one_submission_counts_some_jobs_that_are_not_counted_and_the_next_goes_on(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas, "MOST_COUNTED", 2)
    queue = Queue(database)
    for _ in range(5):
        queue.enqueue(make_request(fresh=True))
    with database.begin() as connection:
        connection.execute(sa.update(jobs).values(stored_bytes=None))
    counts = [count(database) for _ in range(4)]
    assert counts[0] < counts[1] < counts[2] == counts[3] == texts(database)
    with database.begin() as connection:
        one = sa.select(sa.func.min(jobs.c.id)).scalar_subquery()
        connection.execute(sa.update(jobs).where(jobs.c.id == one).values(stored_bytes=None))
        others = connection.scalar(sa.select(sa.func.sum(jobs.c.stored_bytes)))
        for enough, total in ((others - 1, others), (others, others), (others + 1, counts[3])):
            assert sum_stored_bytes(database, connection, LOCAL.owner, int(enough)) == (total, True)


def test_what_an_owner_did_is_kept_up_to_a_number(database: Database, queue: Queue) -> None:
    other, _ = queue.enqueue(make_request(fresh=True), by=Caller("other", USUAL_SCOPES))
    done = [queue.enqueue(make_request(fresh=True))[0].id for _ in range(5)]
    assert prune_most_recorded(database, 2, at_most=1) == 1
    assert [prune_most_recorded(database, keep) for keep in (3, 2)] == [1, 1]
    assert prune_most_recorded(database, 2) == prune_most_recorded(database, 9) == 0
    assert {record.subject for record in read_audit(database)} == {other.id, *done[3:]}
