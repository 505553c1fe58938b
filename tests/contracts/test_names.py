"""Names that hosts, devices and targets choose, however long they are, on both databases."""

from __future__ import annotations

from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.event import Progress
from bexp.storage.audit import read_audit
from bexp.storage.database import Database
from bexp.storage.jobs import JobFilter, JobState, get_job, list_jobs
from bexp.storage.owners import USUAL_SCOPES, Caller
from bexp.storage.queue import Queue
from bexp.storage.tokens import create_token
from bexp.storage.workers import read_workers, register_worker
from tests.contracts.samples import make_recommendation, make_report, make_request, make_trial, make_worker

LONG = "very long name, " * 40
SHOWN = 255


def make_long_report() -> DeviceReport:
    return make_report(f"NVIDIA {LONG}")


def test_a_worker_of_long_names_is_known_and_measures(database: Database) -> None:
    worker = make_worker(
        "w",
        host=LONG,
        device_name=LONG,
        devices=LONG,
        fingerprint=make_long_report().hardware.fingerprint,
        targets={"bexp": "1.0", "own": LONG},
        versions={"package": LONG},
    )
    register_worker(database, worker)
    assert [each.info for each in read_workers(database)] == [worker]
    queue = Queue(database)
    job = queue.enqueue(make_request(target="own"))[0]
    claim = queue.claim(worker)
    assert claim is not None
    queue.pin(claim.lease, make_long_report())
    queue.record(claim.lease, Progress(trial=make_trial(0), recommendation=make_recommendation(4)))
    queue.finish(claim.lease, JobState.SUCCEEDED)
    (listed,), _ = list_jobs(database, wanted=JobFilter(search="nvidia"))
    assert (listed.id, listed.device_name) == (job.id, f"NVIDIA {LONG}"[:SHOWN])
    assert get_job(database, job.id).software == f"bexp 1.0, own {LONG}, package {LONG}"


def test_versions_that_differ_at_the_end_are_not_the_same(database: Database, queue: Queue) -> None:
    queue.enqueue(make_request())
    for end in "ab":
        claim = queue.claim(
            make_worker("w", fingerprint=make_report().hardware.fingerprint, targets={"bexp": LONG + end})
        )
        assert claim is not None
        queue.pin(claim.lease, make_report())
        queue.release(claim.lease)
    assert claim is not None
    assert get_job(database, claim.job.id).software is None


def test_an_action_from_a_long_host_is_recorded(database: Database) -> None:
    create_token(database, "t", by=Caller("team", frozenset(USUAL_SCOPES), origin=f"user@{LONG}"))
    (record,) = read_audit(database, limit=10)
    assert record.origin == f"user@{LONG}"[:SHOWN]
