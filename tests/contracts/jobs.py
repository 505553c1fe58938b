"""What tests do with jobs: claim them, let their leases run out, and read what is stored."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from bexp.explorer.records.recommendation import Answer, VariantAnswer
from bexp.explorer.records.trial import Trial
from bexp.storage.database import Database
from bexp.storage.events import read_events
from bexp.storage.jobs import get_job
from bexp.storage.leases import Claim
from bexp.storage.queue import Queue
from bexp.storage.tables import jobs, recommendations
from bexp.storage.trials import read_trials
from tests.contracts.samples import make_recommendation, make_report, make_worker

FINGERPRINT = make_report().hardware.fingerprint


ANSWER = Answer(
    variants=(VariantAnswer(num_query_groups=4, num_parameters=10, recommendation=make_recommendation()),),
    timings={"queue": 0.5},
)


def claim_next(queue: Queue, worker: str = "a", *, kind: str = "cpu", fingerprint: str = FINGERPRINT) -> Claim | None:
    return queue.claim(make_worker(worker, device_kind=kind, fingerprint=fingerprint))


def claim_one(queue: Queue, worker: str = "a") -> Claim:
    claim = claim_next(queue, worker)
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


def recommendation_rows(database: Database, job_id: str) -> list[sa.Row[Any]]:
    query = sa.select(recommendations).where(recommendations.c.job_id == job_id).order_by(recommendations.c.seq)
    with database.read() as connection:
        return list(connection.execute(query).all())


def codes(database: Database, job_id: str) -> list[int]:
    events = read_events(database, job_id)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert get_job(database, job_id).last_seq == len(events)
    return [int(event.code) for event in events]
