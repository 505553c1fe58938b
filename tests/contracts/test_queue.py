"""A job from its submission to its answer, and how jobs are listed and read, on both databases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from pydantic import BaseModel

from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.event import EventCode, EventDraft, Progress
from bexp.explorer.records.recommendation import Answer, Recommendation
from bexp.explorer.records.trial import Trial
from bexp.explorer.request.request import ExplorationRequest
from bexp.storage.database import Database
from bexp.storage.jobs import JobState, get_job, list_jobs
from bexp.storage.leases import Lease
from bexp.storage.queue import Queue
from bexp.storage.trials import read_trials
from tests.contracts.jobs import ANSWER, claim_next, claim_one, codes, expire, stored_trials
from tests.contracts.samples import make_progress, make_report, make_request, make_trial


def test_a_job_from_enqueue_to_answer(database: Database, queue: Queue) -> None:
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
    assert done.recommendation == ANSWER.recommendation
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
