from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest

from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.run_report import RunReport
from bexp.storage import run_reports as storage_run_reports
from bexp.storage.database import Database
from bexp.storage.jobs import JobNotFoundError
from bexp.storage.leases import Lease
from bexp.storage.owners import LOCAL, USUAL_SCOPES, Caller
from bexp.storage.queue import Queue
from bexp.storage.run_reports import NoAnswerError, TooManyReportsError, insert_run_report, read_run_reports
from tests.contracts.jobs import store
from tests.contracts.samples import make_progress, make_report, make_request, make_worker

REPORT: dict[str, Any] = {
    "tokens_per_second": 71_500.5,
    "peak_bytes": 60 << 30,
    "peak_reserved_bytes": 64 << 30,
    "steps": 20,
    "micro_batch_size": 8,
    "seconds": 12.5,
    "hardware": "NVIDIA H100 80GB HBM3",
    "versions": {"torch": "2.11.0"},
    "finished_at": datetime(2026, 3, 1, 12, tzinfo=UTC),
}


def make(**changes: Any) -> RunReport:
    return RunReport.model_validate(REPORT | changes)


@pytest.fixture
def job_id(database: Database) -> str:
    """An exploration that has a recommendation."""
    queue = Queue(database)
    job, _ = queue.enqueue(make_request())
    report = make_report()
    claim = queue.claim(make_worker("w", fingerprint=report.hardware.fingerprint))
    assert claim is not None
    queue.record(claim.lease, make_progress(0))
    return job.id


def test_reports_are_read_back_in_the_order_of_storing(database: Database, job_id: str) -> None:
    for steps in (3, 1, 2):
        stored = insert_run_report(database, job_id, make(steps=steps))
        assert stored.report.steps == steps
    found = read_run_reports(database, job_id)
    assert [(one.seq, one.report.steps) for one in found] == [(1, 3), (2, 1), (3, 2)]
    assert found[0].report == make(steps=3)
    assert found[0].received_at.tzinfo is not None
    assert [[one.seq for one in read_run_reports(database, job_id, after=seq, limit=1)] for seq in (1, 2)] == [[2], [3]]


def test_a_report_needs_a_recommendation(database: Database) -> None:
    with pytest.raises(JobNotFoundError):
        insert_run_report(database, "nothing", make())
    job, _ = Queue(database).enqueue(make_request())
    with pytest.raises(NoAnswerError):
        insert_run_report(database, job.id, make())
    assert read_run_reports(database, job.id) == []


def test_an_exploration_keeps_a_bounded_number(
    database: Database, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_run_reports, "MAX_REPORTS", 2)
    insert_run_report(database, job_id, make())
    insert_run_report(database, job_id, make())
    with pytest.raises(TooManyReportsError):
        insert_run_report(database, job_id, make())


def test_reports_that_arrive_at_once_are_all_kept(database: Database, job_id: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda steps: insert_run_report(database, job_id, make(steps=steps)), range(1, 9)))
    found = read_run_reports(database, job_id)
    assert [one.seq for one in found] == list(range(1, 9))
    assert {one.report.steps for one in found} == set(range(1, 9))


def test_the_next_exploration_of_the_same_model_is_bound_to_what_real_runs_reached(
    database: Database, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, report = Queue(database), make_report()
    best = make_progress(0).recommendation
    assert best is not None
    queue.pin(Lease(job_id, "w", 1), report)
    reached = {
        "tokens_per_second": 0.9 * best.tokens_per_second,
        "micro_batch_size": best.candidate.micro_batch_size,
        "hardware": report.hardware.device_name,
        "versions": {},
    }

    def begin(worker: str, by: Caller = LOCAL, **changes: Any) -> tuple[Lease, DeviceReport]:
        queue.enqueue(make_request(**changes), by=by)
        claim = queue.claim(make_worker(worker, fingerprint=report.hardware.fingerprint))
        assert claim is not None
        return claim.lease, queue.pin(claim.lease, report)

    assert begin("before")[1].reported_runs == ()
    insert_run_report(database, job_id, make(**reached))
    lease, pinned = begin("after", batch_size=64)
    [found] = pinned.reported_runs
    assert (found.exploration_id, found.num_reports) == (job_id, 1)
    assert found.speed_ratio == pytest.approx(0.9)
    insert_run_report(database, job_id, make(**reached))
    assert queue.pin(lease, report).reported_runs == (found,)
    queue.record(lease, make_progress(0))
    insert_run_report(database, lease.job_id, make(**reached))
    assert [run.exploration_id for run in begin("third")[1].reported_runs] == [lease.job_id, job_id], "the newest first"
    monkeypatch.setattr(storage_run_reports, "MAX_EXPLORATIONS", 1)
    assert [run.exploration_id for run in begin("fourth")[1].reported_runs] == [lease.job_id]
    monkeypatch.undo()
    store(database, lease.job_id, recommendation=None)
    assert [run.exploration_id for run in begin("fifth")[1].reported_runs] == [job_id]
    for driver in "13":  # whose fingerprints are one above and one below
        versions = report.hardware.versions.model_copy(update={"driver": driver})
        other = report.model_copy(update={"hardware": report.hardware.model_copy(update={"versions": versions})})
        queue.enqueue(make_request())
        claim = queue.claim(make_worker("driver", fingerprint=other.hardware.fingerprint))
        assert claim is not None
        assert queue.pin(claim.lease, other).reported_runs == ()
    assert begin("other", mode="eval")[1].reported_runs == ()
    # Anybody can write anything into a report, so it counts for its owner alone.
    assert begin("stranger", Caller("stranger", USUAL_SCOPES))[1].reported_runs == ()
    for unreadable in ({"request": {"of": "another version"}}, {"report": None}):
        store(database, job_id, **unreadable)
        assert begin("reader")[1].reported_runs == ()
