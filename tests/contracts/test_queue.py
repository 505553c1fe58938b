"""What the queue promises, on both databases."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from pydantic import BaseModel

from explorer.records.event import EventCode, EventDraft, Progress
from explorer.records.recommendation import Answer, Recommendation, VariantAnswer
from explorer.records.trial import Trial
from explorer.spec.context_parallel import ContextParallelSpec
from explorer.spec.hardware import DeviceReport
from explorer.spec.request import ExplorationRequest
from storage.database import Database
from storage.events import read_events
from storage.jobs import JobNotFoundError, JobState, get_job
from storage.leases import Claim, HardwareMismatchError, Lease, LeaseLostError
from storage.listing import JobFilter, list_jobs
from storage.queue import Queue
from storage.queue_settings import QueueSettings
from storage.resuming import JobFinishedError
from storage.submission import IdempotencyConflictError
from storage.tables import jobs, trials
from storage.trials import read_trials
from tests.contracts.samples import (
    make_candidate,
    make_progress,
    make_recommendation,
    make_report,
    make_request,
    make_trial,
)

FINGERPRINT = make_report().hardware.fingerprint
ANSWER = Answer(
    variants=(VariantAnswer(num_query_groups=4, num_parameters=10, recommendation=make_recommendation()),),
    timings={"queue": 0.5},
)


def claim_next(queue: Queue, owner: str = "a", *, kind: str = "cpu", fingerprint: str = FINGERPRINT) -> Claim | None:
    return queue.claim(owner, device_kind=kind, num_devices=1, fingerprint=fingerprint)


def claim_one(queue: Queue, owner: str = "a") -> Claim:
    claim = claim_next(queue, owner)
    assert claim is not None
    return claim


def expire(database: Database, job_id: str) -> None:
    """Let the lease of a job run out, as when its worker is killed."""
    with database.begin() as connection:
        past = database.clock(timedelta(seconds=-60))
        connection.execute(sa.update(jobs).where(jobs.c.id == job_id).values(lease_expires_at=past))


def store(database: Database, job_id: str, **values: object) -> None:
    """Write columns of a job as another version of this program may have."""
    with database.begin() as connection:
        connection.execute(sa.update(jobs).where(jobs.c.id == job_id).values(**values))


def stored_trials(database: Database, job_id: str) -> list[Trial]:
    return [stored.trial for stored in read_trials(database, job_id)]


def codes(database: Database, job_id: str) -> list[int]:
    events = read_events(database, job_id)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert get_job(database, job_id).last_seq == len(events)
    return [int(event.code) for event in events]


def test_a_job_from_enqueue_to_answer(database: Database) -> None:
    queue = Queue(database)
    request = make_request(num_query_groups=[4, 2], micro_batch_size=[1, 2, 4], memory_limit_gib=1.5)
    job, is_new = queue.enqueue(request)
    assert is_new
    assert (job.state, job.request, job.attempt, job.last_seq, job.version) == (JobState.QUEUED, request, 0, 1, 1)

    claim = claim_one(queue)
    assert claim.lease == Lease(job.id, "a", 1)
    assert claim.job.state is JobState.RUNNING
    assert claim.history == ()
    assert queue.pin(claim.lease, make_report()) == make_report()
    queue.record(claim.lease, Progress(space={"size": 7}))
    queue.record(claim.lease, make_progress(0))
    end = EventDraft(code=EventCode.SUCCEEDED, message="done")
    queue.finish(claim.lease, JobState.SUCCEEDED, last=Progress((end,), trial=make_trial(1), answer=ANSWER))

    done = get_job(database, job.id)
    assert done.state is JobState.SUCCEEDED
    assert done.report == make_report()
    assert done.space == {"size": 7}
    assert done.recommendation == make_recommendation(1)
    assert done.answer == ANSWER
    assert done.worker is None
    assert done.lease_expires_at is None
    assert done.started_at is not None
    assert done.finished_at is not None
    assert job.created_at <= done.started_at <= done.finished_at
    assert done.version > claim.job.version > job.version
    assert stored_trials(database, job.id) == [make_trial(0), make_trial(1)]
    assert codes(database, job.id) == [101, 102, 201, 401]
    assert claim_next(queue) is None


def test_events_and_trials_are_read_by_cursor(database: Database) -> None:
    queue = Queue(database)
    job, _ = queue.enqueue(make_request())
    claim = claim_one(queue)
    for number in range(4):
        queue.record(claim.lease, make_progress(number))
    assert [event.seq for event in read_events(database, job.id, after=2, limit=3)] == [3, 4, 5]
    assert [event.data for event in read_events(database, job.id, after=5)] == [{"number": 3}]
    assert [stored.trial.number for stored in read_trials(database, job.id, after=0, limit=2)] == [1, 2]
    assert read_events(database, "none") == []


@pytest.mark.parametrize("limit", [1, 2, 10])
def test_paging_while_trials_end_out_of_order_misses_none_and_repeats_none(database: Database, limit: int) -> None:
    queue = Queue(database)
    job, _ = queue.enqueue(make_request())
    claim = claim_one(queue)
    order = [2, 0, 3, 1, 6, 4, 5]
    seen: list[int] = []
    after = -1
    for number in order:
        queue.record(claim.lease, make_progress(number))
        if number in {3, 4}:
            continue  # two at once
        while page := read_trials(database, job.id, after=after, limit=limit):
            assert len(page) <= limit
            seen += [stored.trial.number for stored in page]
            after = page[-1].seq
    assert seen == order

    expire(database, job.id)
    assert [trial.number for trial in claim_one(queue, "b").history] == sorted(order)


def test_each_job_has_its_own_order_of_trials(database: Database) -> None:
    queue = Queue(database)
    claims = []
    for owner in ("a", "b"):
        queue.enqueue(make_request())
        claims.append(claim_one(queue, owner))
    for number in (1, 0):
        for claim in claims:
            queue.record(claim.lease, make_progress(number))
    for claim in claims:
        found = [(stored.seq, stored.trial.number) for stored in read_trials(database, claim.job.id)]
        assert found == [(0, 1), (1, 0)]


def test_text_that_a_database_refuses_is_cleaned(database: Database) -> None:
    queue = Queue(database)
    job, _ = queue.enqueue(make_request())
    claim = claim_one(queue)
    draft = EventDraft(code=EventCode.WARNING, message="a\0b\ud800c", data={"text": "a\0b\ud800c"})
    queue.record(claim.lease, Progress((draft,)))
    queue.finish(claim.lease, JobState.FAILED, error="a\0b")
    stored = read_events(database, job.id)[2]
    assert (stored.message, stored.data) == ("ab?c", {"text": "a\0b\ud800c"})
    assert get_job(database, job.id).error == "ab"


def test_jobs_are_listed_newest_first_by_page_and_state(database: Database) -> None:
    queue = Queue(database)
    ids = [queue.enqueue(make_request())[0].id for _ in range(5)]
    claim_one(queue)
    seen: list[str] = []
    cursor = None
    for _ in range(3):
        page, cursor = list_jobs(database, limit=2, cursor=cursor)
        seen += [job.id for job in page]
    assert cursor is None
    assert seen == ids[::-1]
    running, _ = list_jobs(database, JobFilter(state=JobState.RUNNING))
    assert [job.id for job in running] == ids[:1]
    for wrong in ("nonsense", "é", "MjAyNC0wMS0wMX4"):
        with pytest.raises(ValueError, match="cursor"):
            list_jobs(database, cursor=wrong)


def test_a_missing_job_is_named(database: Database) -> None:
    with pytest.raises(JobNotFoundError, match="'none'"):
        get_job(database, "none")
    with pytest.raises(JobNotFoundError):
        Queue(database).request_cancel("none")


# Idempotency


def test_the_same_key_and_request_give_the_same_job(database: Database) -> None:
    queue = Queue(database)
    first, _ = queue.enqueue(make_request(), idempotency_key="k")
    again, is_new = queue.enqueue(make_request(), idempotency_key="k")
    assert (again.id, is_new) == (first.id, False)
    assert queue.enqueue(make_request(), idempotency_key="other")[1]
    with pytest.raises(IdempotencyConflictError) as caught:
        queue.enqueue(make_request(seed=1), idempotency_key="k")
    assert caught.value.job_id == first.id
    assert codes(database, first.id) == [101]


def test_an_idempotency_key_stands_for_its_request_also_after_an_upgrade(database: Database) -> None:
    queue = Queue(database)
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


def test_a_key_makes_one_job_when_used_at_once(database: Database) -> None:
    queue = Queue(database)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: queue.enqueue(make_request(), idempotency_key="k"), range(8)))
    assert len({job.id for job, _ in results}) == 1
    assert sum(is_new for _, is_new in results) == 1
    assert len(list_jobs(database)[0]) == 1


# Claims


def test_the_oldest_job_that_fits_is_claimed(database: Database) -> None:
    queue = Queue(database)
    on_gpu, _ = queue.enqueue(make_request(device_kind="cuda"))
    anywhere, _ = queue.enqueue(make_request())
    on_cpu, _ = queue.enqueue(make_request(device_kind="cpu"))
    claimed = [claim_next(queue), claim_next(queue), claim_next(queue)]
    assert [claim and claim.job.id for claim in claimed] == [anywhere.id, on_cpu.id, None]
    gpu = claim_next(queue, "b", kind="cuda")
    assert gpu is not None
    assert gpu.job.id == on_gpu.id


def test_a_worker_claims_only_jobs_whose_target_it_has(database: Database) -> None:
    queue = Queue(database)
    of_library = queue.enqueue(make_request(model=None, hf_config={"model_type": "llama"}, hf_seq_length=64))[0]
    own = queue.enqueue(make_request(model=None, target="my-gpt"))[0]
    reference = queue.enqueue(make_request())[0]

    def claim_with(**targets: str) -> str | None:
        claim = queue.claim("a", device_kind="cpu", num_devices=1, fingerprint=FINGERPRINT, targets=targets)
        return claim.job.id if claim is not None else None

    assert claim_with(other="1") is None
    assert claim_with(bexp="0.1.0") == reference.id
    assert claim_with(bexp="0.1.0", **{"my-gpt": "2.0"}) == own.id
    assert claim_with(transformers="5.23.0") == of_library.id
    started = read_events(database, of_library.id)[-1]
    assert (started.code, started.data["target"]) == (102, "transformers 5.23.0")
    assert started.message.endswith("measuring transformers 5.23.0")


def test_a_claim_can_be_limited_to_some_jobs(database: Database) -> None:
    queue = Queue(database)
    oldest, second, third = (queue.enqueue(make_request())[0].id for _ in range(3))

    def claim_among(*job_ids: str) -> str | None:
        claim = queue.claim("a", device_kind="cpu", num_devices=1, fingerprint=FINGERPRINT, among=job_ids)
        return claim.job.id if claim is not None else None

    assert claim_among() is None
    assert claim_among(third, second) == second
    assert claim_among(second) is None
    assert claim_one(queue).job.id == oldest


def test_threads_claim_each_job_once(database: Database) -> None:
    queue = Queue(database)
    ids = {queue.enqueue(make_request())[0].id for _ in range(12)}

    def drain(owner: str) -> list[str]:
        # A worker may find every remaining row locked by others, and asks again.
        claims = [claim_next(queue, owner) for _ in range(60)]
        return [claim.job.id for claim in claims if claim is not None]

    with ThreadPoolExecutor(4) as pool:
        claimed = [job_id for part in pool.map(drain, "abcd") for job_id in part]
    assert len(claimed) == 12
    assert set(claimed) == ids
    for job_id in ids:
        assert codes(database, job_id) == [101, 102]


DRAIN = """
import sys
from storage.database import open_database
from storage.queue import Queue
database = open_database(sys.argv[1])
queue = Queue(database)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(60):
    claim = queue.claim(sys.argv[2], device_kind="cpu", num_devices=1, fingerprint="f")
    if claim is not None:
        print(claim.job.id, flush=True)
database.dispose()
"""


def test_processes_claim_each_job_once(database: Database) -> None:
    queue = Queue(database)
    ids = sorted(queue.enqueue(make_request())[0].id for _ in range(10))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", DRAIN, database.url, owner], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for owner in "ab"
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    claimed = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        claimed += process.communicate(timeout=60)[0].split()
        assert process.returncode == 0
    assert sorted(claimed) == ids


# Leases


@pytest.mark.parametrize(
    ("column", "document", "complaint"),
    [
        ("request", {"model": {"name": "old"}, "lost_field": 1}, "request."),
        ("request", [], "request: "),
        ("report", {"hardware": {}}, "report.hardware."),
    ],
)
def test_a_job_that_cannot_be_read_ends_and_the_next_is_claimed(
    database: Database, column: str, document: object, complaint: str
) -> None:
    queue = Queue(database)
    old, next_ = (queue.enqueue(make_request())[0] for _ in range(2))
    store(database, old.id, **{column: document})
    assert {job.id for job in list_jobs(database)[0]} == {old.id, next_.id}
    assert complaint in (get_job(database, old.id).unreadable or "")

    claim = claim_one(queue)
    assert (claim.job.id, claim.request) == (next_.id, make_request())
    ended = get_job(database, old.id)
    assert ended.state is JobState.FAILED
    assert ended.error == ended.unreadable
    assert "another version stored what this one cannot read" in str(ended.error)
    assert codes(database, old.id) == [EventCode.QUEUED, EventCode.STARTED, EventCode.FAILED]
    assert claim_next(queue) is None


def test_a_job_whose_trials_cannot_be_read_ends(database: Database) -> None:
    queue = Queue(database)
    job, _ = queue.enqueue(make_request())
    claim = claim_one(queue)
    queue.record(claim.lease, make_progress(0))
    with database.begin() as connection:
        connection.execute(sa.update(trials).values(trial={"number": "none"}))
    queue.release(claim.lease)
    assert claim_next(queue) is None
    assert "trial.number" in (get_job(database, job.id).error or "")


def test_a_heartbeat_extends_the_lease(database: Database) -> None:
    queue = Queue(database)
    queue.enqueue(make_request())
    claim = claim_one(queue)
    before = get_job(database, claim.job.id)
    assert not queue.heartbeat(claim.lease).cancel_requested
    after = get_job(database, claim.job.id)
    assert before.lease_expires_at is not None
    assert after.lease_expires_at is not None
    assert after.lease_expires_at > before.lease_expires_at
    assert after.version == before.version


def test_a_live_lease_keeps_others_out_and_an_expired_one_does_not(database: Database) -> None:
    queue = Queue(database)
    job, _ = queue.enqueue(make_request())
    claim_one(queue)
    assert claim_next(queue, "b") is None
    expire(database, job.id)
    assert claim_one(queue, "b").lease.attempt == 2


WRITES: dict[str, Callable[[Queue, Lease], object]] = {
    "heartbeat": lambda queue, lease: queue.heartbeat(lease),
    "watch": lambda queue, lease: queue.watch(lease),
    "record": lambda queue, lease: queue.record(lease, make_progress(5)),
    "record_again": lambda queue, lease: queue.record(lease, make_progress(0), after_seq=2),
    "report_fault": lambda queue, lease: queue.report_fault(lease, "a bug"),
    "pin": lambda queue, lease: queue.pin(lease, make_report()),
    "finish": lambda queue, lease: queue.finish(lease, JobState.SUCCEEDED, answer=ANSWER),
    "release": lambda queue, lease: queue.release(lease),
    "confirm_cancel": lambda queue, lease: queue.confirm_cancel(lease),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_lost_lease_writes_nothing(database: Database, write: str) -> None:
    """Not even when the job went to a new claim of the same owner."""
    queue = Queue(database)
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


def test_a_finished_job_takes_no_more(database: Database) -> None:
    queue = Queue(database)
    job, _ = queue.enqueue(make_request())
    claim = claim_one(queue)
    queue.finish(claim.lease, JobState.FAILED, error="a bug")
    with pytest.raises(LeaseLostError):
        queue.record(claim.lease, make_progress(0))
    assert codes(database, job.id) == [101, 102, 403]
    assert read_events(database, job.id)[-1].message == "Exploration failed: a bug"


def test_a_resumed_job_brings_its_history(database: Database) -> None:
    queue = Queue(database)
    job, _ = queue.enqueue(make_request())
    first = claim_one(queue)
    queue.pin(first.lease, make_report())
    queue.record(first.lease, make_progress(0))
    queue.record(first.lease, make_progress(1))
    expire(database, job.id)
    second = claim_one(queue, "b")
    assert second.history == (make_trial(0), make_trial(1))
    assert second.job.recommendation == make_recommendation(2)
    assert codes(database, job.id) == [101, 102, 201, 201, 106]
    assert "2 stored trials" in read_events(database, job.id)[-1].message


@pytest.mark.parametrize(
    "step", [make_progress(0), Progress((EventDraft(code=EventCode.WARNING, message="one event without a trial"),))]
)
def test_a_step_whose_commit_was_not_confirmed_counts_once(database: Database, step: Progress) -> None:
    queue = Queue(database)
    job, _ = queue.enqueue(make_request())
    claim = claim_one(queue)
    for _ in range(2):
        assert queue.record(claim.lease, step, after_seq=claim.job.last_seq) == 3
    assert len(codes(database, job.id)) == 3
    assert stored_trials(database, job.id) == ([] if step.trial is None else [step.trial])
    with pytest.raises(LeaseLostError):  # a step that the log has gone beyond
        queue.record(claim.lease, make_progress(5), after_seq=1)


def test_another_trial_of_the_same_number_is_refused_whole(database: Database) -> None:
    queue = Queue(database)
    job, _ = queue.enqueue(make_request())
    claim = claim_one(queue)
    queue.record(claim.lease, make_progress(0))
    other = make_trial(0).model_copy(update={"tokens_per_second": 7.0})
    with pytest.raises(sa.exc.IntegrityError):
        queue.record(claim.lease, Progress((EventDraft(code=EventCode.TRIAL, message="twice"),), trial=other))
    assert codes(database, job.id) == [101, 102, 201]
    assert stored_trials(database, job.id) == [make_trial(0)]


def test_seq_has_no_gaps_under_concurrent_writers(database: Database) -> None:
    queue = Queue(database)
    job, _ = queue.enqueue(make_request())
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


def test_a_job_whose_workers_keep_dying_is_given_up(database: Database) -> None:
    queue = Queue(database, QueueSettings(max_attempts=2, retry_pause=timedelta(0)))
    job, _ = queue.enqueue(make_request())
    for _ in range(2):
        claim_one(queue)
        expire(database, job.id)
    assert claim_next(queue) is None
    failed = get_job(database, job.id)
    assert failed.state is JobState.FAILED
    assert "given up after 2 attempts in a row that ended with the worker" in str(failed.error)
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


def test_faults_of_a_job_and_of_the_infrastructure_are_counted_apart(database: Database) -> None:
    queue = Queue(database, QueueSettings(max_attempts=3, max_faults=3, retry_pause=timedelta(0)))
    job, _ = queue.enqueue(make_request())
    for _ in range(2):
        queue.release(claim_one(queue).lease, trouble="the disk is full")
        assert queue.report_fault(claim_one(queue).lease, "internal error: of all things") is JobState.QUEUED
    assert queue.report_fault(claim_one(queue).lease, "internal error: of all things") is JobState.FAILED
    assert get_job(database, job.id).error == "internal error: of all things"
    assert codes(database, job.id)[-2:] == [106, 403]


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


# Transactions


def test_no_transaction_is_open_while_a_document_is_validated_or_dumped(
    sqlite_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is frozen within a transaction would keep the lock that all others wait for."""
    queue = Queue(sqlite_database)
    open_transactions: list[str] = []
    held: list[int] = []
    for name in ("begin", "read"):
        monkeypatch.setattr(sqlite_database, name, _watched(getattr(sqlite_database, name), held))
    for model in (ExplorationRequest, DeviceReport, Recommendation, Answer, Trial):
        for name in ("model_validate", "model_dump"):
            monkeypatch.setattr(model, name, _noting(model, name, held, open_transactions))
    job, _ = queue.enqueue(make_request())
    claim = claim_one(queue)
    queue.pin(claim.lease, make_report())
    queue.record(claim.lease, make_progress(0))
    queue.note_waiting()
    expire(sqlite_database, job.id)
    claim = claim_one(queue, "b")
    queue.request_cancel(job.id)
    queue.finish(claim.lease, JobState.SUCCEEDED, answer=ANSWER, last=make_progress(1))
    get_job(sqlite_database, job.id)
    list_jobs(sqlite_database)
    read_trials(sqlite_database, job.id)
    assert open_transactions == []


def _watched(open_one: Callable[[], Any], held: list[int]) -> Callable[[], Any]:
    @contextmanager
    def watched() -> Iterator[sa.Connection]:
        with open_one() as connection:
            held.append(1)
            try:
                yield connection
            finally:
                held.pop()

    return watched


def _noting(model: type[BaseModel], name: str, held: list[int], found: list[str]) -> Any:
    original = getattr(model, name)

    def noting(*arguments: Any, **options: Any) -> Any:
        if held:
            found.append(f"{model.__name__}.{name}")
        return original(*arguments, **options)

    def method(self: BaseModel, *arguments: Any, **options: Any) -> Any:
        return noting(self, *arguments, **options)

    return noting if name == "model_validate" else method


# Hardware


@pytest.mark.parametrize(
    ("sizes", "first", "began_with", "later"),
    [((1, 2), 2, 3, 2), ("explore", 2, 3, 2), ((1, 2), 2, 4, 4), ((1,), 1, 2, 1), ((1,), 1, 4, 4)],
)
def test_a_job_whose_devices_share_sequences_waits_for_as_many(
    database: Database, sizes: tuple[int, ...] | str, first: int, began_with: int, later: int
) -> None:
    """At least as many as it needs; once begun, as many as it found there to share sequences, or to train together."""
    queue = Queue(database)
    spec = ContextParallelSpec.model_validate({"sizes": sizes})
    job, _ = queue.enqueue(make_request(num_devices=4, batch_size=8, context_parallel=spec))

    def claim(num_devices: int) -> Claim | None:
        return queue.claim("a", device_kind="cpu", num_devices=num_devices, fingerprint=FINGERPRINT)

    assert claim(first - 1) is None
    found = make_report()
    found = found.model_copy(update={"hardware": found.hardware.model_copy(update={"num_devices": began_with})})
    taken = claim(began_with)
    assert taken is not None
    queue.pin(taken.lease, found)
    queue.release(taken.lease)
    assert claim(later - 1) is None
    resumed = claim(later)
    assert resumed is not None
    assert resumed.job.id == job.id


def test_a_job_stays_on_the_hardware_that_it_started_on(database: Database) -> None:
    queue = Queue(database)
    job, _ = queue.enqueue(make_request())
    first = claim_one(queue)
    queue.pin(first.lease, make_report())
    expire(database, job.id)
    other = make_report("Another device")
    assert claim_next(queue, "b", fingerprint=other.hardware.fingerprint) is None
    second = claim_one(queue, "c")
    with pytest.raises(HardwareMismatchError, match="Another device"):
        queue.pin(second.lease, other)


def test_a_resumed_job_keeps_its_first_report(database: Database) -> None:
    """The peaks of a report are measured and differ a little each time; the search must not move with them."""
    queue = Queue(database)
    job, _ = queue.enqueue(make_request())
    queue.pin(claim_one(queue).lease, make_report())
    expire(database, job.id)
    hardware = make_report().hardware.model_copy(update={"memory_bandwidth_bytes_per_second": 2e10})
    again = make_report().model_copy(update={"hardware": hardware})
    assert queue.pin(claim_one(queue, "b").lease, again) == make_report()
    assert get_job(database, job.id).report == make_report()


# Cancellation


def test_a_queued_job_is_cancelled_at_once(database: Database) -> None:
    queue = Queue(database)
    job, _ = queue.enqueue(make_request())
    assert queue.request_cancel(job.id).state is JobState.CANCELLED
    assert claim_next(queue) is None
    assert queue.request_cancel(job.id).state is JobState.CANCELLED
    assert codes(database, job.id) == [101, 404]


def test_a_running_job_is_cancelled_by_its_worker(database: Database) -> None:
    queue = Queue(database)
    job, _ = queue.enqueue(make_request())
    claim = claim_one(queue)
    asked = queue.request_cancel(job.id)
    assert (asked.state, asked.cancel_requested) == (JobState.RUNNING, True)
    assert asked.version > claim.job.version
    assert queue.watch(claim.lease).cancel_requested
    assert queue.heartbeat(claim.lease).cancel_requested
    assert queue.request_cancel(job.id).version == asked.version
    queue.confirm_cancel(claim.lease)
    assert get_job(database, job.id).state is JobState.CANCELLED
    assert codes(database, job.id) == [101, 102, 404]


def test_a_job_whose_worker_is_lost_is_cancelled_at_once(database: Database) -> None:
    queue = Queue(database)
    job, _ = queue.enqueue(make_request())
    claim_one(queue)
    expire(database, job.id)
    assert queue.request_cancel(job.id).state is JobState.CANCELLED


@pytest.mark.parametrize("by", ["claim", "note_waiting", "request_cancel"])
def test_a_cancelled_job_that_its_worker_put_back_ends(database: Database, by: str) -> None:
    """The worker may be told to end before it sees the cancellation."""
    queue = Queue(database)
    job, _ = queue.enqueue(make_request())
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
def test_a_worker_lost_after_a_cancellation_leaves_no_job_running(database: Database, by: str) -> None:
    queue = Queue(database)
    job, _ = queue.enqueue(make_request())
    claim_one(queue)
    queue.request_cancel(job.id)
    expire(database, job.id)
    if by == "claim":
        assert claim_next(queue, "b") is None
    else:
        queue.note_waiting()
    assert get_job(database, job.id).state is JobState.CANCELLED
    assert codes(database, job.id) == [101, 102, 404]


def test_a_finished_job_is_not_cancelled(database: Database) -> None:
    queue = Queue(database)
    job, _ = queue.enqueue(make_request())
    queue.finish(claim_one(queue).lease, JobState.SUCCEEDED, answer=ANSWER)
    assert queue.request_cancel(job.id) == get_job(database, job.id)
    assert get_job(database, job.id).state is JobState.SUCCEEDED


@pytest.mark.parametrize("end", [JobState.CANCELLED, JobState.FAILED])
def test_a_job_that_was_stopped_is_resumed_with_its_trials(database: Database, end: JobState) -> None:
    queue = Queue(database)
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


def test_a_candidate_survives_the_round_trip(database: Database) -> None:
    queue = Queue(database)
    queue.enqueue(make_request())
    claim = claim_one(queue)
    queue.record(claim.lease, make_progress(2))
    assert read_trials(database, claim.job.id)[0].trial.candidate == make_candidate(3)
