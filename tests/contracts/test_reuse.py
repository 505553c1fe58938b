"""Stored answers that serve the same request again, on both databases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from bexp.explorer.records.event import EventCode, Progress
from bexp.explorer.records.recommendation import Alternative, Answer, Role, VariantAnswer
from bexp.explorer.records.run_report import RunReport
from bexp.explorer.request.request import request_key
from bexp.storage.audit import Action, read_audit
from bexp.storage.database import Database
from bexp.storage.events import read_events
from bexp.storage.jobs import Job, JobNotFoundError, JobState, get_job
from bexp.storage.leases import Claim
from bexp.storage.owners import LOCAL, USUAL_SCOPES, Caller
from bexp.storage.pruning import delete_job, prune
from bexp.storage.queue import Queue
from bexp.storage.quotas import QueuedQuotaError, Quota, set_quota
from bexp.storage.reuse import find_answer
from bexp.storage.run_reports import insert_run_report
from bexp.storage.workers import WorkerState, forget_worker, read_workers, register_worker
from tests.contracts.jobs import expire, recommendation_rows
from tests.contracts.samples import (
    make_candidate,
    make_recommendation,
    make_report,
    make_request,
    make_trial,
    make_worker,
)
from tests.explorer.alternatives import alternative

HARDWARE = make_report().hardware.model_copy(update={"memory_limit_bytes": 500_000_000})
REPORT = make_report().model_copy(update={"hardware": HARDWARE})
FINGERPRINT = HARDWARE.fingerprint
TARGETS = {"bexp": "0.2.0"}
PACKAGES = {"bexp": "0.2.0", "liger-kernel": "0.6.0"}
OTHER = Caller("other", USUAL_SCOPES)


def claim_next(
    queue: Queue,
    targets: dict[str, str] | None = None,
    fingerprint: str = FINGERPRINT,
    memory_limit_bytes: int = HARDWARE.memory_limit_bytes,
) -> Claim | None:
    return queue.claim(
        make_worker(
            "w",
            fingerprint=fingerprint,
            targets=TARGETS if targets is None else targets,
            memory_limit_bytes=memory_limit_bytes,
            versions=PACKAGES,
        )
    )


def measure(
    queue: Queue,
    *,
    confidence: int = 96,
    completed_target: int | None = None,
    required_bytes: int = 1 << 21,
    alternatives: tuple[Alternative, ...] = (),
    by: Caller = LOCAL,
    **changes: Any,
) -> Job:
    """Submit a request, and end it with a trial and an answer of this confidence."""
    job, _ = queue.enqueue(make_request(**changes), by=by)
    claim = claim_next(queue)
    assert claim is not None
    assert claim.job.id == job.id
    queue.pin(claim.lease, REPORT)
    changed = {"confidence": confidence, "required_bytes": required_bytes, "alternatives": alternatives}
    found = make_recommendation().model_copy(update=changed)
    variant = VariantAnswer(
        num_query_groups=4, num_parameters=1, recommendation=found, completed_target=completed_target
    )
    last = Progress(recommendation=found, answer=Answer(variants=(variant,)), trial=make_trial(0))
    queue.finish(claim.lease, JobState.SUCCEEDED, last=last)
    return job


def add_worker(
    database: Database,
    fingerprint: str = FINGERPRINT,
    targets: Mapping[str, str] = TARGETS,
    packages: Mapping[str, str] = PACKAGES,
    memory_limit_bytes: int = HARDWARE.memory_limit_bytes,
    num_devices: int = 1,
) -> None:
    versions = {"python": "3.12", "torch": "2.13", **packages}
    info = make_worker("live", fingerprint=fingerprint, targets=targets, devices="cpu", versions=versions)
    register_worker(database, replace(info, memory_limit_bytes=memory_limit_bytes, num_devices=num_devices))


def source(queue: Queue, **changes: Any) -> str | None:
    """Submit a request; return the exploration that it is answered from at once."""
    job, is_new = queue.enqueue(make_request(**changes))
    assert is_new
    assert (job.state is JobState.SUCCEEDED) == (job.reused_from is not None)
    return job.reused_from


def test_the_same_request_is_answered_at_once_where_a_live_worker_would_measure_it_alike(database: Database) -> None:
    queue = Queue(database)
    first = measure(queue)
    add_worker(database, num_devices=2)
    again, _ = queue.enqueue(make_request(labels={"run": "7"}, budget={"max_seconds": 5}))
    assert again.id != first.id
    assert (again.state, again.reused_from) == (JobState.SUCCEEDED, first.id)
    assert again.answer is not None
    assert again.recommendation is not None
    assert (again.finished_at, again.attempt) != (None, 1)
    events = read_events(database, again.id)
    told = (EventCode.QUEUED, EventCode.ANSWERED, EventCode.RECOMMENDATION, EventCode.SUCCEEDED)
    assert tuple(event.code for event in events) == told
    assert again.last_seq == len(events)
    assert first.id in events[1].message
    assert [row.seq for row in recommendation_rows(database, again.id)] == [again.last_seq]
    assert claim_next(queue) is None
    prune(database, [first.id])  # the copy stays, and answers nobody else
    assert source(queue) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"fresh": True},
        {"seed": 1},
        {"micro_batch_size": "auto"},
        {"budget": {"confidence_target": 97}},
        {"budget": {"trial_timeout_seconds": 5}},
        {"device_kind": "cuda"},
    ],
)
def test_a_request_that_asks_for_more_or_for_something_else_is_measured(
    database: Database, queue: Queue, changes: dict[str, Any]
) -> None:
    measure(queue)
    add_worker(database)
    assert source(queue, **changes) is None


def test_other_hardware_and_other_versions_measure_again(database: Database, queue: Queue) -> None:
    measure(queue)
    assert source(queue) is None  # no worker is there that could say what it has
    add_worker(database, fingerprint="another")
    assert source(queue) is None
    add_worker(database, targets={"bexp": "0.3.0"})
    assert source(queue) is None
    add_worker(database, packages=PACKAGES | {"liger-kernel": "0.7.0"})
    assert source(queue) is None


@pytest.mark.parametrize(
    ("share", "changes", "serves"),
    [
        (1.0, {}, True),
        (0.9, {}, True),
        (1.1, {}, True),
        (1.11, {}, False),  # other candidates may fit
        (0.89, {}, False),
        (0.7, {"memory_limit_gib": 0.25}, True),  # the request's own limit holds on a CPU, whatever is free
    ],
)
def test_an_answer_serves_where_about_as_much_memory_may_be_used(
    database: Database, queue: Queue, share: float, changes: dict[str, Any], serves: bool
) -> None:
    limit = round(share * HARDWARE.memory_limit_bytes)
    first = measure(queue, **changes)
    add_worker(database, memory_limit_bytes=limit)
    assert source(queue, **changes) == (first.id if serves else None)
    forget_worker(database, "live")
    job, _ = queue.enqueue(make_request(**changes))  # the rule is the same when a worker takes it
    claim = claim_next(queue, memory_limit_bytes=limit)
    assert (claim is None) == serves
    assert (get_job(database, job.id).reused_from is not None) == serves


@pytest.mark.parametrize("divides", [True, False])
def test_an_answer_whose_recommendation_does_not_fit_does_not_serve(database: Database, divides: bool) -> None:
    """Nor where the candidate that divides the batch, which a trainer would use, does not fit."""
    queue, required_bytes = Queue(database), HARDWARE.memory_limit_bytes - 1
    dividing = alternative(Role.DIVIDING, make_candidate(), required_bytes=required_bytes)
    first = measure(queue, required_bytes=required_bytes) if divides else measure(queue, alternatives=(dividing,))
    add_worker(database, memory_limit_bytes=required_bytes - 1)
    assert source(queue) is None
    add_worker(database, memory_limit_bytes=required_bytes)
    assert source(queue) == first.id


def test_a_stored_answer_takes_nothing_of_a_quota(database: Database, queue: Queue) -> None:
    first = measure(queue)
    set_quota(database, LOCAL.owner, Quota(max_queued=0, max_running=0))
    with pytest.raises(QueuedQuotaError):
        queue.enqueue(make_request())
    add_worker(database)
    assert source(queue) == first.id


def test_an_answer_that_its_budget_cut_short_serves_lower_targets_alone(database: Database, queue: Queue) -> None:
    add_worker(database)
    short = measure(queue, confidence=60)
    assert source(queue, budget={"confidence_target": 60}) == short.id
    assert source(queue) is None
    assert claim_next(queue) is not None
    whole = measure(queue, confidence=80, completed_target=95)
    assert source(queue) == whole.id
    assert source(queue, budget={"confidence_target": 96}) is None


def test_a_worker_that_takes_a_job_answers_it_from_what_is_stored(database: Database, queue: Queue) -> None:
    first = measure(queue)
    waiting = [queue.enqueue(make_request())[0].id for _ in range(2)]
    other, _ = queue.enqueue(make_request(seed=1))
    claim = claim_next(queue)
    assert claim is not None
    assert claim.job.id == other.id
    for job_id in waiting:
        codes = [event.code for event in read_events(database, job_id)]
        assert codes[:3] == [EventCode.QUEUED, EventCode.STARTED, EventCode.ANSWERED]
        assert codes[-1] is EventCode.SUCCEEDED
        assert [row.seq for row in recommendation_rows(database, job_id)] == [len(codes)]
    add_worker(database)
    assert source(queue) == first.id  # an answer that was reused is traced to what measured it


def test_a_worker_that_is_frozen_before_it_answers_from_what_is_stored_goes_on_without_the_job(
    database: Database, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure(queue)
    taken, _ = queue.enqueue(make_request())
    others: list[Claim | None] = []

    def freeze(*arguments: Any) -> Any:
        monkeypatch.undo()
        stored = find_answer(*arguments)
        expire(database, taken.id)
        others.append(claim_next(queue))  # it answers the job from what is stored
        return stored

    monkeypatch.setattr("bexp.storage.claims.find_answer", freeze)
    assert claim_next(queue) is None
    assert others == [None]
    codes = [event.code for event in read_events(database, taken.id)]
    assert codes.count(EventCode.SUCCEEDED) == 1
    assert codes[-1] is EventCode.SUCCEEDED


@pytest.mark.parametrize("before", ["0.1.0", "0.2.0", "0.3.0"])
def test_a_job_that_two_versions_measured_answers_nobody(database: Database, queue: Queue, before: str) -> None:
    add_worker(database)
    job, _ = queue.enqueue(make_request())
    claim = claim_next(queue, targets={"bexp": before})
    assert claim is not None
    queue.release(claim.lease)
    claim = claim_next(queue)
    assert claim is not None
    queue.pin(claim.lease, REPORT)
    variant = VariantAnswer(num_query_groups=4, num_parameters=1, recommendation=make_recommendation())
    queue.finish(claim.lease, JobState.SUCCEEDED, answer=Answer(variants=(variant,)))
    assert source(queue, budget={"confidence_target": 1}) == (job.id if before == TARGETS["bexp"] else None)


def test_an_answer_without_a_recommendation_and_a_failure_serve_nobody(database: Database, queue: Queue) -> None:
    add_worker(database)
    nothing = Answer(variants=(VariantAnswer.without_model("no candidate fits"),))
    variant = VariantAnswer(num_query_groups=4, num_parameters=1, recommendation=make_recommendation())
    found = Answer(variants=(variant,))
    for state, answer in ((JobState.SUCCEEDED, nothing), (JobState.FAILED, None), (JobState.FAILED, found)):
        queue.enqueue(make_request())
        claim = claim_next(queue)
        assert claim is not None
        queue.pin(claim.lease, REPORT)
        queue.finish(claim.lease, state, answer=answer)
        assert source(queue, budget={"confidence_target": 1}) is None
        assert queue.claim(make_worker("x", fingerprint=FINGERPRINT)) is not None


def test_a_report_of_a_real_run_makes_the_next_request_measure_again(database: Database, queue: Queue) -> None:
    add_worker(database)
    first = measure(queue)
    copy = source(queue)
    assert copy == first.id
    report = RunReport(
        tokens_per_second=900.0,
        steps=10,
        micro_batch_size=2,
        seconds=1.0,
        hardware="A device",
        finished_at=datetime(2026, 1, 1, tzinfo=UTC),
    )
    insert_run_report(database, measure(queue, by=OTHER).id, report)
    assert source(queue) == first.id
    insert_run_report(database, first.id, report)
    assert source(queue) is None


def test_the_key_of_a_request_leaves_out_what_is_not_asked() -> None:
    plain = request_key(make_request())
    assert plain == request_key(make_request(labels={"a": "b"}, notices=("ignored: x",), target="bexp"))
    assert plain != request_key(make_request(tolerance=0.05))
    assert request_key(make_request(model=None, target="my-gpt")) is None


def test_nobody_gets_deletes_or_sees_what_belongs_to_others(database: Database, queue: Queue) -> None:
    add_worker(database)
    first = measure(queue)
    theirs, _ = queue.enqueue(make_request(), by=OTHER)
    assert theirs.state is JobState.QUEUED
    claim = queue.claim(make_worker("live", fingerprint=FINGERPRINT, targets=TARGETS))
    assert claim is not None
    assert claim.job.id == theirs.id
    shown = {owner: read_workers(database, owner=owner)[0] for owner in (None, "other", "local")}
    assert {worker.state for worker in shown.values()} == {WorkerState.MEASURING}
    assert [worker.job_id for worker in shown.values()] == [theirs.id, theirs.id, None]
    with pytest.raises(JobNotFoundError):
        delete_job(database, first.id, by=OTHER)
    delete_job(database, first.id)
    assert [(record.action, record.subject) for record in read_audit(database, limit=1)] == [(Action.DELETE, first.id)]
