"""Which job a worker takes, and how often it may, on both databases."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import sqlalchemy as sa

from bexp.explorer.dimensions.context_parallel import ContextParallelSpec
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.event import EventCode
from bexp.storage.database import Database
from bexp.storage.events import read_events
from bexp.storage.jobs import Job, JobState, get_job, list_jobs
from bexp.storage.leases import Claim, HardwareMismatchError
from bexp.storage.queue import Queue
from bexp.storage.queue_settings import QueueSettings
from bexp.storage.tables import trials
from tests.contracts.jobs import FINGERPRINT, claim_next, claim_one, codes, expire, store
from tests.contracts.processes import drain, run_two
from tests.contracts.samples import make_progress, make_report, make_request, make_worker


def test_the_oldest_job_that_fits_is_claimed(queue: Queue) -> None:
    on_gpu, _ = queue.enqueue(make_request(device_kind="cuda"))
    anywhere, _ = queue.enqueue(make_request())
    on_cpu, _ = queue.enqueue(make_request(device_kind="cpu"))
    claimed = [claim_next(queue), claim_next(queue), claim_next(queue)]
    assert [claim and claim.job.id for claim in claimed] == [anywhere.id, on_cpu.id, None]
    gpu = claim_next(queue, "b", kind="cuda")
    assert gpu is not None
    assert gpu.job.id == on_gpu.id
    queue.enqueue(make_request(device_kind="cpu"))
    assert claim_next(queue, "b", kind="cuda") is None


def test_a_worker_claims_only_jobs_whose_target_it_has(database: Database, queue: Queue) -> None:
    of_library = queue.enqueue(make_request(model=None, hf_config={"model_type": "llama"}, hf_seq_length=64))[0]
    own = queue.enqueue(make_request(model=None, target="my-gpt"))[0]
    reference = queue.enqueue(make_request())[0]

    def claim_with(**targets: str) -> str | None:
        claim = queue.claim(make_worker(fingerprint=FINGERPRINT, targets=targets))
        return claim.job.id if claim is not None else None

    assert claim_with(other="1") is None
    assert claim_with(bexp="0.1.0") == reference.id
    assert claim_with(bexp="0.1.0", **{"my-gpt": "2.0"}) == own.id
    assert claim_with(transformers="5.23.0") == of_library.id
    started = read_events(database, of_library.id)[-1]
    assert (started.code, started.data["target"]) == (102, "transformers 5.23.0")
    assert started.message.endswith("measuring transformers 5.23.0")


def test_a_worker_is_asked_whether_it_is_able_once_there_is_a_job(database: Database) -> None:
    queue, asked = Queue(database), []
    worker = make_worker(fingerprint=FINGERPRINT)

    def answer(able: bool) -> bool:
        asked.append(able)
        return able

    assert queue.claim(worker, is_able=lambda: answer(True)) is None
    assert asked == []
    job, _ = queue.enqueue(make_request())
    assert queue.claim(worker, is_able=lambda: answer(False)) is None
    left = get_job(database, job.id)
    assert (left.state, left.attempt, left.version) == (JobState.QUEUED, 0, job.version)
    assert queue.claim(worker, is_able=lambda: answer(True)) is not None
    assert asked == [False, True]


def test_a_claim_can_be_limited_to_some_jobs(queue: Queue) -> None:
    oldest, second, third = (queue.enqueue(make_request())[0].id for _ in range(3))

    def claim_among(*job_ids: str) -> str | None:
        claim = queue.claim(make_worker(fingerprint=FINGERPRINT), among=job_ids)
        return claim.job.id if claim is not None else None

    assert claim_among() is None
    assert claim_among(third, second) == second
    assert claim_among(second) is None
    assert claim_one(queue).job.id == oldest


LONG = QueueSettings(lease=timedelta(hours=1))
"""A busy host may take longer than a lease lasts, after which others rightly claim its job."""


def test_threads_claim_each_job_once(database: Database) -> None:
    queue = Queue(database, LONG)
    ids = {queue.enqueue(make_request())[0].id for _ in range(12)}
    claimed: list[str] = []

    def drain(owner: str) -> None:
        while len(claimed) < 12:  # a worker may find every remaining row locked by others, and asks again
            claim = claim_next(queue, owner)
            claimed.extend([] if claim is None else [claim.job.id])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(drain, "abcd"))
    assert sorted(claimed) == sorted(ids)
    assert claim_next(queue) is None
    for job_id in ids:
        assert codes(database, job_id) == [101, 102]


@pytest.mark.slow(together="databases")
def test_processes_claim_each_job_once(database: Database, queue: Queue) -> None:
    ids = sorted(queue.enqueue(make_request())[0].id for _ in range(10))
    assert sorted(run_two(drain, database.url)) == ids


@pytest.mark.parametrize(
    ("column", "document", "complaint"),
    [
        ("request", {"model": {"name": "old"}, "lost_field": 1}, ": request.model.num_layers: is missing"),
        ("request", [], "request: "),
        ("report", {"hardware": {}}, ": report.hardware.device_kind: is missing"),
    ],
)
def test_a_job_that_cannot_be_read_ends_and_the_next_is_claimed(
    database: Database, queue: Queue, column: str, document: object, complaint: str
) -> None:
    old, next_ = (queue.enqueue(make_request())[0] for _ in range(2))
    store(database, old.id, **{column: document})
    assert {job.id for job in list_jobs(database)[0]} == {old.id, next_.id}
    assert complaint in (get_job(database, old.id).unreadable or "")
    store(database, next_.id, request=[], report=[])
    assert ": request: " in (get_job(database, next_.id).unreadable or ""), "the first part that cannot be read"
    store(database, next_.id, request=make_request().model_dump(mode="json"), report=None)

    claim = claim_one(queue)
    assert (claim.job.id, claim.request) == (next_.id, make_request())
    ended = get_job(database, old.id)
    assert ended.state is JobState.FAILED
    assert ended.error == ended.unreadable
    assert "another version stored what this one cannot read" in str(ended.error)
    assert codes(database, old.id) == [EventCode.QUEUED, EventCode.STARTED, EventCode.FAILED]
    assert claim_next(queue) is None


def test_a_job_whose_trials_cannot_be_read_ends(database: Database, queue: Queue, job: Job) -> None:
    claim = claim_one(queue)
    queue.record(claim.lease, make_progress(0))
    with database.begin() as connection:
        connection.execute(sa.update(trials).values(trial={"measurement": "none"}))
    queue.release(claim.lease)
    assert claim_next(queue) is None
    assert "trial.measurement" in (get_job(database, job.id).error or "")


@pytest.mark.parametrize(
    ("sizes", "first", "began_with", "later"),
    [((1, 2), 2, 3, 2), ("explore", 2, 3, 2), ((1, 2), 2, 4, 4), ((1,), 1, 2, 1), ((1,), 1, 4, 4)],
)
def test_a_job_whose_devices_share_sequences_waits_for_as_many(
    queue: Queue, sizes: tuple[int, ...] | str, first: int, began_with: int, later: int
) -> None:
    """At least as many as it needs; once begun, as many as it found there to share sequences, or to train together."""
    spec = ContextParallelSpec.model_validate({"sizes": sizes})
    job, _ = queue.enqueue(make_request(num_devices=4, batch_size=8, context_parallel=spec))

    def claim(num_devices: int) -> Claim | None:
        return queue.claim(make_worker(num_devices=num_devices, fingerprint=FINGERPRINT))

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


def test_a_job_stays_on_the_hardware_that_it_started_on(database: Database, queue: Queue, job: Job) -> None:
    first = claim_one(queue)
    queue.pin(first.lease, make_report())
    expire(database, job.id)
    other = make_report("Another device")
    for fingerprint in (other.hardware.fingerprint, "", "~"):
        assert claim_next(queue, "b", fingerprint=fingerprint) is None
    second = claim_one(queue, "c")
    with pytest.raises(HardwareMismatchError, match="Another device"):
        queue.pin(second.lease, other)


def test_a_resumed_job_keeps_its_first_report(database: Database, queue: Queue, job: Job) -> None:
    """The peaks of a report are measured and differ a little each time; the search must not move with them."""
    queue.pin(claim_one(queue).lease, make_report())
    expire(database, job.id)
    hardware = make_report().hardware.model_copy(update={"memory_bandwidth_bytes_per_second": 2e10})
    again = make_report().model_copy(update={"hardware": hardware})
    assert queue.pin(claim_one(queue, "b").lease, again) == make_report()
    assert get_job(database, job.id).report == make_report()


def test_a_job_that_was_refused_gets_a_new_report_once_it_is_resumed(database: Database, queue: Queue) -> None:
    """A host that was too busy to prepare it, or a library that was too old, may be another by then."""
    job, _ = queue.enqueue(make_request())
    lease = claim_one(queue).lease
    refused = DeviceReport.refused(make_report().hardware, "no result within 180 s")
    assert queue.pin(lease, refused).refusal == refused.refusal
    queue.finish(lease, JobState.FAILED, error="no result within 180 s")
    queue.resume(job.id)
    assert queue.pin(claim_one(queue, "b").lease, make_report()) == make_report()
    assert get_job(database, job.id).report == make_report()
