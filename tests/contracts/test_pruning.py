"""Retention by age and by count, on both databases."""

from __future__ import annotations

from datetime import timedelta

import pytest
import sqlalchemy as sa

from bexp.storage import pruning
from bexp.storage.audit import Action, read_audit
from bexp.storage.database import Database
from bexp.storage.jobs import JobFilter, JobState, get_job, list_jobs
from bexp.storage.pruning import JobNotFinishedError, delete_job, drop_finished_studies, find_prunable, prune
from bexp.storage.queue import Queue
from bexp.storage.studies import write_studies
from bexp.storage.tables import events, jobs, trials
from tests.contracts.samples import make_progress, make_report, make_request, make_worker


@pytest.fixture
def finished(database: Database) -> list[str]:
    """Four finished jobs, oldest first, that finished 4, 3, 2 and 1 days ago; a running and a queued one are beside."""
    queue = Queue(database)
    found = []
    for days in (4, 3, 2, 1, 0):
        queue.enqueue(make_request())
        claim = queue.claim(make_worker())
        assert claim is not None
        queue.pin(claim.lease, make_report())
        queue.record(claim.lease, make_progress(0))
        if not days:
            break
        queue.finish(claim.lease, JobState.FAILED)
        found.append(claim.job.id)
        with database.begin() as connection:
            at = database.clock(-timedelta(days=days))
            connection.execute(sa.update(jobs).where(jobs.c.id == claim.job.id).values(finished_at=at))
    queue.enqueue(make_request())
    return found


def test_finished_jobs_are_kept_by_age_and_by_count(database: Database, finished: list[str]) -> None:
    assert find_prunable(database) == []
    assert find_prunable(database, older_than=timedelta(days=2.5)) == finished[:2]
    assert find_prunable(database, keep=1) == finished[:3]
    assert find_prunable(database, keep=0) == finished
    assert find_prunable(database, keep=3, older_than=timedelta(days=2.5)) == finished[:2]


def test_an_owner_with_many_jobs_does_not_displace_those_of_another(database: Database, finished: list[str]) -> None:
    with database.begin() as connection:
        connection.execute(sa.update(jobs).where(jobs.c.id == finished[0]).values(owner="modest"))
    assert find_prunable(database, keep=2) == finished[1:3]
    assert find_prunable(database, keep=1) == finished[:3]


def test_a_job_that_is_resumed_meanwhile_is_not_deleted(
    database: Database, finished: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "_drop_studies", lambda *_: Queue(database).resume(finished[0]))
    with pytest.raises(JobNotFinishedError, match="is queued"):
        delete_job(database, finished[0])
    assert get_job(database, finished[0]).state is JobState.QUEUED
    assert read_audit(database, limit=1)[0].action is Action.RESUME


def test_a_pruned_job_leaves_nothing_and_others_stay(
    database: Database, finished: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "_BATCH", 2)
    write_studies(database, finished[0])
    write_studies(database, finished[3])
    running = list_jobs(database, JobFilter(state=JobState.RUNNING))[0][0].id
    prune(database, [*finished[:2], running])
    left = {job.id for job in list_jobs(database)[0]}
    assert left >= {*finished[2:], running}
    assert len(left) == 4
    with database.read() as connection:
        for table in (events, trials):
            assert not connection.scalar(sa.select(sa.func.count()).where(table.c.job_id.in_(finished[:2])))
    assert drop_finished_studies(database) == 1
