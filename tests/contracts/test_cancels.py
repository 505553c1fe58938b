"""Jobs that are cancelled, and jobs that are resumed after their end, on both databases."""

from __future__ import annotations

import pytest

from bexp.storage.database import Database
from bexp.storage.events import read_events
from bexp.storage.jobs import Job, JobState, get_job
from bexp.storage.queue import Queue
from bexp.storage.queue_settings import QueueSettings
from bexp.storage.submission import JobFinishedError
from tests.contracts.jobs import ANSWER, claim_next, claim_one, codes, expire
from tests.contracts.samples import make_progress, make_request


def test_a_queued_job_is_cancelled_at_once(database: Database, queue: Queue, job: Job) -> None:
    assert queue.request_cancel(job.id).state is JobState.CANCELLED
    assert claim_next(queue) is None
    assert queue.request_cancel(job.id).state is JobState.CANCELLED
    assert codes(database, job.id) == [101, 404]
    told = [event.message for event in read_events(database, job.id)]
    assert told == [f"Exploration {job.id} of tiny is queued", "Exploration cancelled"]


def test_a_running_job_is_cancelled_by_its_worker(database: Database, queue: Queue, job: Job) -> None:
    claim = claim_one(queue)
    asked = queue.request_cancel(job.id)
    assert (asked.state, asked.cancel_requested) == (JobState.RUNNING, True)
    assert asked.version > claim.job.version
    assert queue.watch(claim.lease).cancel_requested
    assert queue.heartbeat(claim.lease).cancel_requested
    assert queue.request_cancel(job.id).version == asked.version
    queue.finish(claim.lease, JobState.CANCELLED)
    assert get_job(database, job.id).state is JobState.CANCELLED
    assert codes(database, job.id) == [101, 102, 404]


def test_a_job_whose_worker_is_lost_is_cancelled_at_once(database: Database, queue: Queue, job: Job) -> None:
    claim_one(queue)
    expire(database, job.id)
    assert queue.request_cancel(job.id).state is JobState.CANCELLED


@pytest.mark.parametrize("by", ["claim", "note_waiting", "request_cancel"])
def test_a_cancelled_job_that_its_worker_put_back_ends(database: Database, queue: Queue, job: Job, by: str) -> None:
    """The worker may be told to end before it sees the cancellation."""
    claim = claim_one(queue)
    queue.request_cancel(job.id)
    queue.release(claim.lease)
    if by == "claim":
        assert claim_next(queue) is None
    elif by == "note_waiting":
        queue.note_waiting()
    else:
        queue.request_cancel(job.id)
    assert get_job(database, job.id).state is JobState.CANCELLED
    assert codes(database, job.id) == [101, 102, 404]


@pytest.mark.parametrize("by", ["claim", "note_waiting"])
def test_a_worker_lost_after_a_cancellation_leaves_no_job_running(database: Database, queue: Queue, by: str) -> None:
    lost = [queue.enqueue(make_request())[0].id for _ in range(2)]
    for job_id in lost:
        claim_one(queue)
        queue.request_cancel(job_id)
        expire(database, job_id)
    if by == "claim":
        assert claim_next(queue, "b") is None
    else:
        queue.note_waiting()
    for job_id in lost:
        assert get_job(database, job_id).state is JobState.CANCELLED
        assert codes(database, job_id) == [101, 102, 404]


def test_a_finished_job_is_not_cancelled(database: Database, queue: Queue, job: Job) -> None:
    queue.finish(claim_one(queue).lease, JobState.SUCCEEDED, answer=ANSWER)
    assert queue.request_cancel(job.id) == get_job(database, job.id)
    assert get_job(database, job.id).state is JobState.SUCCEEDED


@pytest.mark.parametrize("end", [JobState.CANCELLED, JobState.FAILED])
def test_a_job_that_was_stopped_is_resumed_with_its_trials(database: Database, queue: Queue, end: JobState) -> None:
    job, _ = queue.enqueue(make_request())
    lease = claim_one(queue).lease
    queue.record(lease, make_progress(0))
    queue.finish(lease, end, error="broken" if end is JobState.FAILED else None)
    for _ in range(2):  # it can be repeated
        resumed = queue.resume(job.id)
        assert (resumed.state, resumed.error, resumed.finished_at) == (JobState.QUEUED, None, None)
    again = claim_one(queue)
    assert [trial.number for trial in again.history] == [0]
    assert queue.resume(job.id).state is JobState.RUNNING
    queue.finish(again.lease, JobState.SUCCEEDED, answer=ANSWER)
    log = codes(database, job.id)
    ended = 403 if end is JobState.FAILED else 404
    assert [code for code in log if code not in {201, 202}] == [101, 102, ended, 101, 106, 401]
    with pytest.raises(JobFinishedError):
        queue.resume(job.id)


def test_a_resumed_job_has_all_of_its_attempts_again(database: Database) -> None:
    queue = Queue(database, QueueSettings(max_attempts=1))
    job, _ = queue.enqueue(make_request())
    claim_one(queue)
    expire(database, job.id)
    assert claim_next(queue) is None
    assert get_job(database, job.id).state is JobState.FAILED
    queue.resume(job.id)
    assert claim_one(queue).job.attempt == 2
