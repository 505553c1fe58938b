"""The finished trials of a job: stored under the job's row as they end, read by cursor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from bexp.explorer.records.trial import Trial
from bexp.storage.database import Database
from bexp.storage.tables import trials


@dataclass(frozen=True, slots=True)
class StoredTrial:
    """A trial and its place in the order of storing.

    `seq` grows with each stored trial of the job; it is the page cursor. A trial's number is given before the trial is
    measured, so a trial with a higher number may end, and be stored, first.
    """

    seq: int
    trial: Trial


def read_trials(database: Database, job_id: str, *, after: int = -1, limit: int = 1000) -> list[StoredTrial]:
    """Return trials with `seq` > `after`, in the order of storing, at most `limit`; none for an unknown job.

    A reader that goes on after the last `seq` misses no trial and repeats none, even while the job runs.
    """
    query = (
        sa.select(trials.c.seq, trials.c.trial)
        .where(trials.c.job_id == job_id, trials.c.seq > after)
        .order_by(trials.c.seq)
        .limit(limit)
    )
    with database.read() as connection:
        rows = connection.execute(query).all()
    return [StoredTrial(row.seq, Trial.model_validate(row.trial)) for row in rows]


def read_all_trials(database: Database, job_id: str) -> list[Trial]:
    """Return all trials of a job in the order of their numbers."""
    with database.read() as connection:
        documents = select_trial_documents(connection, job_id)
    return [Trial.model_validate(document) for document in documents]


def select_trial_documents(connection: sa.Connection, job_id: str) -> list[Any]:
    """Return the stored documents of all trials in the order of their numbers, within a transaction."""
    query = sa.select(trials.c.trial).where(trials.c.job_id == job_id)
    return list(connection.scalars(query.order_by(trials.c.number)))


def dump_trial(trial: Trial | None) -> dict[str, Any] | None:
    """Return the columns of a trial that `insert_trial` stores; call it before the transaction."""
    if trial is None:
        return None
    outcome = trial.measurement.outcome.value
    return {"number": trial.number, "outcome": outcome, "trial": trial.model_dump(mode="json")}


def insert_trial(database: Database, connection: sa.Connection, job_id: str, dumped: dict[str, Any]) -> None:
    """Insert a dumped trial with the next `seq`.

    The caller has changed the job's row in this transaction: that lock keeps concurrent writers apart until the
    commit, so nobody sees a `seq` before all smaller ones.
    """
    last = sa.select(sa.func.coalesce(sa.func.max(trials.c.seq), -1)).where(trials.c.job_id == job_id)
    seq = last.scalar_subquery() + 1
    connection.execute(sa.insert(trials).values(job_id=job_id, seq=seq, at=database.clock(), **dumped))
