"""What a worker may write under its lease, and what counts as a fault, on both databases."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from bexp.explorer.records.event import EventCode, EventDraft, Progress
from bexp.storage.database import Database
from bexp.storage.events import read_events
from bexp.storage.jobs import Job, JobState, get_job
from bexp.storage.leases import LONGEST_LEASE, Lease, LeaseLostError, is_held
from bexp.storage.queue import Queue
from bexp.storage.queue_settings import QueueSettings
from bexp.storage.tables import jobs
from bexp.storage.trials import read_trials
from tests.contracts.jobs import ANSWER, claim_next, claim_one, codes, expire, store, stored_trials
from tests.contracts.samples import make_progress, make_recommendation, make_report, make_request, make_trial


def test_a_heartbeat_extends_the_lease(database: Database, queue: Queue) -> None:
    queue.enqueue(make_request())
    claim = claim_one(queue)
    before = get_job(database, claim.job.id)
    assert not queue.heartbeat(claim.lease).cancel_requested
    after = get_job(database, claim.job.id)
    assert before.lease_expires_at is not None
    assert after.lease_expires_at is not None
    assert after.lease_expires_at > before.lease_expires_at
    assert after.version == before.version


def test_the_longest_lease_is_held_for_a_statement_that_read_the_clock_before_it_was_given(database: Database) -> None:
    queue = Queue(database, QueueSettings(lease=LONGEST_LEASE))
    job, _ = queue.enqueue(make_request())
    held = sa.select(jobs.c.id).where(is_held(database))  # as in a statement that waits for others that write
    claim_one(queue)
    with database.read() as connection:
        assert connection.scalar(held) == job.id
    for hours, is_still in ((47, True), (49, False)):
        held = sa.select(jobs.c.id).where(is_held(database))
        with database.begin() as connection:
            connection.execute(sa.update(jobs).values(lease_expires_at=database.clock(timedelta(hours=hours))))
            assert (connection.scalar(held) is not None) is is_still


def test_a_lease_a_pause_and_a_cancel_do_not_wait_for_a_clock_that_was_set_back(database: Database) -> None:
    queue = Queue(database)
    past_jobs = [queue.enqueue(make_request())[0] for _ in range(3)]
    claims = [claim_one(queue) for _ in past_jobs]
    queue.release(claims[2].lease, trouble="the device is gone")
    with database.begin() as connection:
        later = {
            "lease_expires_at": database.clock(timedelta(days=400)),
            "not_before": database.clock(timedelta(hours=1)),
        }
        for name, value in later.items():
            column = jobs.c[name]
            connection.execute(sa.update(jobs).where(column.is_not(None)).values({name: value}))
    assert queue.request_cancel(past_jobs[0].id).state is JobState.CANCELLED
    assert {claim_one(queue, "b").job.id for _ in range(2)} == {past_jobs[1].id, past_jobs[2].id}


WRITES: dict[str, Callable[[Queue, Lease], object]] = {
    "heartbeat": lambda queue, lease: queue.heartbeat(lease),
    "watch": lambda queue, lease: queue.watch(lease),
    "record": lambda queue, lease: queue.record(lease, make_progress(5)),
    "record_again": lambda queue, lease: queue.record(lease, make_progress(0), after_seq=2),
    "report_fault": lambda queue, lease: queue.report_fault(lease, "a bug"),
    "pin": lambda queue, lease: queue.pin(lease, make_report()),
    "finish": lambda queue, lease: queue.finish(lease, JobState.SUCCEEDED, answer=ANSWER),
    "release": lambda queue, lease: queue.release(lease),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_lost_lease_writes_nothing(database: Database, queue: Queue, write: str) -> None:
    """Not even when the job went to a new claim of the same owner."""
    for next_owner in ("b", "a"):
        job, _ = queue.enqueue(make_request())
        old = claim_one(queue, "a")
        queue.record(old.lease, make_progress(0))
        expire(database, job.id)
        new = claim_one(queue, next_owner)
        before = get_job(database, job.id)
        with pytest.raises(LeaseLostError):
            WRITES[write](queue, old.lease)
        assert get_job(database, job.id) == before
        assert codes(database, job.id) == [101, 102, 201, 106]
        assert len(read_trials(database, job.id)) == 1
        queue.record(new.lease, make_progress(1))


@pytest.mark.parametrize("write", [name for name in WRITES if name != "watch"])
def test_what_a_worker_writes_at_once_is_one_transaction(database: Database, queue: Queue, write: str) -> None:
    """Between two, somebody could see the one without the other, or the worker could die."""
    queue.enqueue(make_request())
    lease = claim_one(queue).lease
    begun: list[object] = []
    sa.event.listen(database.engine, "commit", begun.append)
    WRITES[write](queue, lease)
    assert sum(not connection.get_execution_options().get("bexp_read_only") for connection in begun) == 1  # type: ignore[attr-defined]  # connections


def test_a_resumed_job_brings_its_history(database: Database, queue: Queue, job: Job) -> None:
    first = claim_one(queue)
    queue.pin(first.lease, make_report())
    queue.record(first.lease, make_progress(0))
    queue.release(first.lease)
    first = claim_one(queue)
    assert read_events(database, job.id)[-1].message.endswith("with 1 stored trial")
    queue.record(first.lease, make_progress(1))
    expire(database, job.id)
    second = claim_one(queue, "b")
    assert second.history == (make_trial(0), make_trial(1))
    assert second.job.recommendation == make_recommendation(2)
    assert codes(database, job.id) == [101, 102, 201, 106, 201, 106]
    told = read_events(database, job.id)[-1].message
    assert told.startswith("Exploration resumed by worker b")
    assert "2 stored trials" in told


@pytest.mark.parametrize(
    "step", [make_progress(0), Progress((EventDraft(code=EventCode.WARNING, message="one event without a trial"),))]
)
def test_a_step_whose_commit_was_not_confirmed_counts_once(database: Database, queue: Queue, step: Progress) -> None:
    for others in ("0" * 16, "f" * 16):  # their logs go on too, and do not count
        queue.enqueue(make_request(), job_id=others)
        lease = claim_one(queue).lease
        for number in range(2):
            queue.record(lease, make_progress(number))
    job, _ = queue.enqueue(make_request())
    claim = claim_one(queue)
    for _ in range(2):
        assert queue.record(claim.lease, step, after_seq=claim.job.last_seq) == 3
    assert len(codes(database, job.id)) == 3
    assert stored_trials(database, job.id) == ([] if step.trial is None else [step.trial])
    for elsewhere in (1, 4):  # the log has gone beyond the step, or ends before it, as in a restored backup
        with pytest.raises(LeaseLostError):
            queue.record(claim.lease, make_progress(5), after_seq=elsewhere)


@pytest.mark.parametrize("was_stored", [False, True])
def test_a_worker_that_was_frozen_stores_its_step_once_beside_a_reason_for_waiting(
    database: Database, queue: Queue, was_stored: bool
) -> None:
    job, _ = queue.enqueue(make_request())
    claim = claim_one(queue)
    for number, after in ((0, 2), (1, 4)):
        step = make_progress(number)
        if was_stored:
            queue.record(claim.lease, step, after_seq=after)
        expire(database, job.id)
        queue.note_waiting(grace=timedelta(0))  # no worker is alive
        assert get_job(database, job.id).waiting_reason == "none is running"
        assert queue.record(claim.lease, step, after_seq=after) == after + 2
    assert codes(database, job.id) == [101, 102, *([201, 105] if was_stored else [105, 201]) * 2]
    assert stored_trials(database, job.id) == [make_trial(0), make_trial(1)]
    queue.record(claim.lease, make_progress(2))
    assert get_job(database, job.id).waiting_reason is None


def test_another_trial_of_the_same_number_is_refused_whole(database: Database, queue: Queue, job: Job) -> None:
    claim = claim_one(queue)
    queue.record(claim.lease, make_progress(0))
    other = make_trial(0).model_copy(update={"tokens_per_second": 7.0})
    with pytest.raises(sa.exc.IntegrityError):
        queue.record(claim.lease, Progress((EventDraft(code=EventCode.TRIAL, message="twice"),), trial=other))
    assert codes(database, job.id) == [101, 102, 201]
    assert stored_trials(database, job.id) == [make_trial(0)]


def test_seq_has_no_gaps_under_concurrent_writers(database: Database, queue: Queue, job: Job) -> None:
    claim = claim_one(queue)

    def write(writer: int) -> None:
        for i in range(6):
            drafts = [EventDraft(code=EventCode.WARNING, message=f"{writer}.{i}.{j}") for j in range(2)]
            queue.record(claim.lease, Progress(tuple(drafts)))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert len(codes(database, job.id)) == 2 + 4 * 6 * 2
    messages = [event.message for event in read_events(database, job.id, after=2)]
    assert len(set(messages)) == 48
    for first, second in zip(messages[::2], messages[1::2], strict=True):
        assert first[:-1] == second[:-1]  # what one writer appends at once stays together


def test_a_released_job_goes_back_and_its_attempt_is_not_counted(database: Database) -> None:
    queue = Queue(database, QueueSettings(max_attempts=2, retry_pause=timedelta(0)))
    job, _ = queue.enqueue(make_request())
    for attempt in range(1, 5):
        claim = claim_one(queue)
        assert claim.lease.attempt == attempt
        queue.release(claim.lease)
        assert get_job(database, job.id).state is JobState.QUEUED
    assert claim_one(queue).lease.attempt == 5


@pytest.mark.parametrize("allowed", [2, 1])
def test_a_job_whose_workers_keep_dying_is_given_up(database: Database, allowed: int) -> None:
    queue = Queue(database, QueueSettings(max_attempts=2, retry_pause=timedelta(0)))
    job, _ = queue.enqueue(make_request())
    for _ in range(2):
        claim_one(queue)
        expire(database, job.id)
    assert claim_next(Queue(database, QueueSettings(max_attempts=allowed))) is None
    failed = get_job(database, job.id)
    assert failed.state is JobState.FAILED
    assert f"given up after {allowed} attempts in a row that ended with the worker" in str(failed.error)
    assert codes(database, job.id) == [101, 102, 106, 403]


def test_a_job_that_is_put_back_with_trouble_says_so_and_is_given_up_in_the_end(database: Database) -> None:
    queue = Queue(database, QueueSettings(max_attempts=2, retry_pause=timedelta(0)))
    job, _ = queue.enqueue(make_request())
    for _ in range(2):
        queue.release(claim_one(queue).lease, trouble="the device fell off the bus")
    assert claim_next(queue) is None
    assert get_job(database, job.id).state is JobState.FAILED
    assert codes(database, job.id) == [101, 102, 302, 106, 302, 403]


def test_a_stored_trial_clears_the_count_of_attempts_and_of_faults(database: Database) -> None:
    queue = Queue(database, QueueSettings(max_attempts=2, max_faults=2, retry_pause=timedelta(0)))
    job, _ = queue.enqueue(make_request())
    for number in range(4):
        claim = claim_one(queue)
        queue.record(claim.lease, make_progress(number))
        if number % 2:
            expire(database, job.id)
        else:
            assert queue.report_fault(claim.lease, "internal error") is JobState.QUEUED
    claim_one(queue)
    assert get_job(database, job.id).state is JobState.RUNNING
    expire(database, job.id)  # the second in a row, because the attempt that stored the trial ended like this too
    assert claim_next(queue) is None
    assert get_job(database, job.id).state is JobState.FAILED


def test_faults_of_a_job_and_of_the_infrastructure_are_counted_apart(database: Database) -> None:
    queue = Queue(database, QueueSettings(max_attempts=3, max_faults=3, retry_pause=timedelta(0)))
    job, _ = queue.enqueue(make_request())
    for _ in range(2):
        queue.release(claim_one(queue).lease, trouble="the disk is full")
        assert queue.report_fault(claim_one(queue).lease, "internal error: of all things") is JobState.QUEUED
    assert queue.report_fault(claim_one(queue).lease, "internal error: of all things") is JobState.FAILED
    assert get_job(database, job.id).error == "internal error: of all things"
    assert codes(database, job.id)[-2:] == [106, 403]


@pytest.mark.parametrize("allowed", [1, 2])
def test_a_job_has_all_of_its_faults_at_first_and_when_it_is_resumed(database: Database, allowed: int) -> None:
    queue = Queue(database, QueueSettings(max_faults=allowed, retry_pause=timedelta(0)))
    job, _ = queue.enqueue(make_request())
    for _ in range(2):
        states = [queue.report_fault(claim_one(queue).lease, "internal error") for _ in range(allowed)]
        assert states == [*[JobState.QUEUED] * (allowed - 1), JobState.FAILED]
        queue.resume(job.id)


def test_a_job_that_is_put_back_with_trouble_waits_twice_as_long_each_time(database: Database) -> None:
    queue = Queue(database, QueueSettings(retry_pause=timedelta(seconds=40)))
    queue.enqueue(make_request())
    claim = claim_one(queue)
    queue.release(claim.lease, trouble="the disk is full")
    assert claim_next(queue) is None
    store(database, claim.job.id, not_before=datetime.now(UTC))
    again = claim_one(queue)
    queue.release(again.lease, trouble="the disk is full")
    with database.read() as connection:
        wait = connection.execute(sa.select(jobs.c.not_before)).scalar_one() - database.now(connection)
    assert timedelta(seconds=50) < wait <= timedelta(seconds=60)
