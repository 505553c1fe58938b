"""A job whose command has started a worker for it: no other one takes it while that one lives."""

from __future__ import annotations

from datetime import timedelta

import pytest
import sqlalchemy as sa

from bexp.explorer.records.event import EventCode
from bexp.storage.database import Database
from bexp.storage.events import read_events
from bexp.storage.jobs import Job, JobState, get_job
from bexp.storage.matching import OWN_WORKER_TERM, keep_job, share_job
from bexp.storage.queue import Queue
from bexp.storage.statistics import read_statistics
from bexp.storage.tables import events, jobs
from bexp.storage.waiting import DEVICE_HELD, note_reason
from bexp.storage.workers import LIVE_WITHIN, forget_worker, register_worker
from tests.contracts.jobs import expire, store
from tests.contracts.samples import make_report, make_request, make_worker
from tests.contracts.test_reuse import TARGETS, add_worker, measure, source

NO_GRACE = timedelta(0)
FINGERPRINT = make_report().hardware.fingerprint
ANY, OWN = make_worker("any", fingerprint=FINGERPRINT), make_worker("own", fingerprint=FINGERPRINT, name="me")


def silence(database: Database, job_id: str) -> None:
    """Let the term of its own worker run out, as when that is killed."""
    store(database, job_id, own_worker_until=None)


def told(database: Database, job_id: str) -> list[str]:
    return [event.message for event in read_events(database, job_id) if event.code is EventCode.WAITING]


def test_a_job_says_whether_its_own_worker_starts_or_has_ended(database: Database, queue: Queue) -> None:
    job, _ = queue.enqueue(make_request(), own_worker="me")
    register_worker(database, ANY)
    queue.note_waiting(grace=NO_GRACE)
    assert told(database, job.id) == ["Waiting: its own worker is starting"]
    assert queue.claim(ANY) is None
    register_worker(database, OWN)
    queue.note_waiting(grace=NO_GRACE)
    assert told(database, job.id)[1:] == ["A worker can run it now"]
    forget_worker(database, OWN.id)
    silence(database, job.id)
    queue.note_waiting(grace=NO_GRACE)
    assert told(database, job.id)[2:] == ["Waiting: its own worker has ended"]
    assert queue.claim(ANY) is None, "it may be for a device of its machine"


@pytest.fixture(params=["queued", "begun"])
def own(request: pytest.FixtureRequest, database: Database, queue: Queue) -> Job:
    """A job of the worker `OWN`, which perhaps has begun it, and was lost then."""
    job, _ = queue.enqueue(make_request(), own_worker="me")
    if request.param == "begun":
        assert queue.claim(OWN) is not None
        expire(database, job.id)
    return job


def test_a_job_whose_own_worker_has_ended_fails_in_the_end(database: Database, queue: Queue, own: Job) -> None:
    silence(database, own.id)
    for _ in range(2):
        queue.note_waiting(grace=NO_GRACE, max_wait=NO_GRACE)
        with database.begin() as connection:
            connection.execute(sa.update(events).values(at=database.clock(-LIVE_WITHIN)))
    ended = get_job(database, own.id)
    assert (ended.state, ended.error) == (
        JobState.FAILED,
        "no worker could run it within 0 s: its own worker has ended",
    )


@pytest.mark.parametrize("name", ["", "another"])
def test_a_job_is_resumed_for_others_once_its_own_worker_has_ended(
    database: Database, queue: Queue, own: Job, name: str
) -> None:
    other = make_worker("other", fingerprint=FINGERPRINT, name=name)
    assert queue.resume(own.id, own_worker=name).own_worker == "me", "that one may still start"
    assert queue.claim(other) is None
    silence(database, own.id)
    assert queue.resume(own.id, own_worker=name).own_worker == name
    assert queue.claim(OWN) is None
    assert queue.claim(other) is not None


@pytest.mark.parametrize("name", ["", "another"])
def test_a_job_that_runs_is_left_to_its_worker(database: Database, queue: Queue, name: str) -> None:
    job, _ = queue.enqueue(make_request(), own_worker=name)
    assert queue.claim(make_worker("w", name=name)) is not None
    silence(database, job.id)
    assert queue.resume(job.id, own_worker="me").own_worker == name
    expire(database, job.id)
    keep_job(database, job.id, "me")  # as the resuming command's worker repeats
    claim = queue.claim(make_worker("w", name="me"))
    assert claim is not None
    assert claim.job.id == job.id


def test_an_ended_job_is_resumed_at_once_for_whoever_asks(database: Database, queue: Queue) -> None:
    job, _ = queue.enqueue(make_request(), own_worker="me")
    for name in ("another", ""):
        queue.request_cancel(job.id)
        keep_job(database, job.id, "me")
        assert get_job(database, job.id).state is JobState.CANCELLED
        assert queue.resume(job.id, own_worker=name).own_worker == name
    assert queue.claim(ANY) is not None


def test_a_shared_job_is_any_workers_at_once_and_another_commands_job_stays(
    database: Database, queue: Queue, own: Job
) -> None:
    share_job(database, own.id, "another")
    assert queue.claim(ANY) is None
    share_job(database, own.id, "me")
    assert queue.claim(ANY) is not None


def test_a_cancel_of_its_command_leaves_a_job_that_is_another_workers(queue: Queue) -> None:
    job, _ = queue.enqueue(make_request(), own_worker="another")
    assert queue.request_cancel(job.id, own_worker="me").state is JobState.QUEUED
    assert queue.request_cancel(job.id, own_worker="another").state is JobState.CANCELLED


def test_a_job_ends_at_once_when_its_command_knows_that_its_own_worker_has_ended(queue: Queue) -> None:
    """Its lease would hold for half a minute, and its resumption meet the cancel."""
    job, _ = queue.enqueue(make_request(), own_worker="me")
    assert queue.claim(OWN) is not None
    asked = queue.request_cancel(job.id, own_worker="me")
    assert (asked.state, asked.cancel_requested) == (JobState.RUNNING, True), "its worker measures, and will see it"
    assert queue.request_cancel(job.id, own_worker="another", has_ended=True).state is JobState.RUNNING
    assert queue.request_cancel(job.id, own_worker="me", has_ended=True).state is JobState.CANCELLED
    assert queue.resume(job.id, own_worker="another").own_worker == "another"
    assert queue.claim(make_worker("w", name="another")) is not None


def test_a_term_that_was_given_before_the_clock_was_set_back_is_none(database: Database, queue: Queue) -> None:
    job, _ = queue.enqueue(make_request(), own_worker="me")
    for factor, owner in ((1.5, "me"), (3, "")):
        with database.begin() as connection:
            connection.execute(sa.update(jobs).values(own_worker_until=database.clock(factor * OWN_WORKER_TERM)))
        assert queue.resume(job.id).own_worker == owner


def test_a_worker_of_one_command_changes_nothing_for_other_jobs(database: Database, queue: Queue) -> None:
    """It comes and goes within seconds."""
    waiting = [queue.enqueue(make_request(device_kind=kind))[0].id for kind in (None, "cpu", "cuda")]
    queue.enqueue(make_request(), own_worker="me")
    for _ in range(3):
        register_worker(database, OWN)
        queue.note_waiting(grace=NO_GRACE)
        counts = read_statistics(database)
        forget_worker(database, OWN.id)
        queue.note_waiting(grace=NO_GRACE)
    assert [told(database, job_id) for job_id in waiting] == [["Waiting for a worker: none is running"]] * 3
    assert (counts.workers_by_device_kind, counts.workers_by_target) == ({}, {})
    assert (counts.num_without_worker, counts.jobs_by_state[JobState.QUEUED]) == (3, 4)


def test_the_worker_of_a_killed_command_is_no_lost_one_and_its_job_no_old_one(database: Database) -> None:
    register_worker(database, OWN)
    Queue(database).enqueue(make_request(), own_worker="me")
    counts = read_statistics(database, live_within=-LIVE_WITHIN)
    assert (counts.num_lost_workers, counts.oldest_queued_seconds) == (0, 0)
    register_worker(database, ANY)
    assert read_statistics(database, live_within=-LIVE_WITHIN).num_lost_workers == 1


def test_a_worker_that_waits_for_its_device_says_so_until_it_has_it(database: Database, queue: Queue) -> None:
    job, _ = queue.enqueue(make_request(), own_worker="me")
    note_reason(database, job.id, f"{DEVICE_HELD}: by another")
    queue.note_waiting(grace=NO_GRACE)
    assert told(database, job.id) == ["Waiting: the device is in use: by another"]
    register_worker(database, OWN)
    queue.note_waiting(grace=NO_GRACE)
    assert told(database, job.id)[1:] == ["A worker can run it now"]


def test_a_stored_answer_of_another_workers_hardware_does_not_serve_it(database: Database, queue: Queue) -> None:
    """Else what a command asks of its own device would be what a CPU beside it has measured."""
    add_worker(database)
    measured = measure(queue)
    assert source(queue) == measured.id
    job, _ = queue.enqueue(make_request(), own_worker="me")
    assert job.state is JobState.QUEUED


def test_a_live_gpu_of_which_no_answer_is_stored_measures_what_names_no_device(database: Database) -> None:
    queue = Queue(database)
    add_worker(database)
    measured = measure(queue)
    register_worker(database, make_worker("gpu", "cuda", fingerprint="gpu", targets=TARGETS))
    assert source(queue) is None
    forget_worker(database, "gpu")
    assert source(queue) == measured.id
