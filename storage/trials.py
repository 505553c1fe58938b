"""The finished trials of a job: each is stored under the job's row when it ends, and all are read by cursor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from bexp.explorer.records.trial import Trial
from bexp.storage.database import Database
from bexp.storage.tables import trials


@dataclass(frozen=True, slots=True)
class StoredTrial:
    """A trial and its place in the order of storing.

    `seq` grows with each stored trial of the job, and is the page cursor. A trial has its number before it is measured,
    so a trial with a higher number may end, and be stored, first.
    """

    seq: int
    trial: Trial


_COLUMNS = {
    "number": "number",
    "kind": "kind",
    "tokens_per_second": "tokens_per_second",
    "measured_peak_bytes": "peak_bytes",
    "seconds": "seconds",
}
"""Fields of a trial with a column of their own, and the column."""


def read_trials(database: Database, job_id: str, *, after: int = -1, limit: int = 1000) -> list[StoredTrial]:
    """Return trials with `seq` > `after`, in the order of storing, at most `limit`; none for an unknown job.

    A reader that goes on after the last `seq` misses no trial and repeats none, even while the job runs.
    """
    query = sa.select(trials).where(trials.c.job_id == job_id, trials.c.seq > after)
    with database.read() as connection:
        rows = connection.execute(query.order_by(trials.c.seq).limit(limit)).all()
    return [StoredTrial(row.seq, trial_from_row(row)) for row in rows]


def read_all_trials(database: Database, job_id: str) -> list[Trial]:
    """Return all trials of a job in the order of their numbers."""
    with database.read() as connection:
        rows = select_trials(connection, job_id)
    return [trial_from_row(row) for row in rows]


def select_trials(connection: sa.Connection, job_id: str) -> Sequence[sa.Row[Any]]:
    """Return the rows of all trials in the order of their numbers, for `trial_from_row` after the transaction."""
    query = sa.select(trials).where(trials.c.job_id == job_id)
    return connection.execute(query.order_by(trials.c.number)).all()


def trial_from_row(row: sa.Row[Any]) -> Trial:
    """Return the trial in a row.

    Raises:
        pydantic.ValidationError: another version stored what this one cannot read.
    """
    columns = {field: getattr(row, column) for field, column in _COLUMNS.items()}
    return Trial.model_validate({**row.trial, **columns})


def trial_values(trial: Trial | None) -> dict[str, Any] | None:
    """Return the columns of a trial that `insert_trial` stores; call it before the transaction."""
    if trial is None:
        return None
    return {
        **{column: getattr(trial, field) for field, column in _COLUMNS.items()},
        "micro_batch_size": trial.candidate.micro_batch_size,
        "outcome": trial.measurement.outcome.value,
        "trial": trial.model_dump(mode="json", exclude_defaults=True, exclude=set(_COLUMNS)),
    }


def insert_trial(database: Database, connection: sa.Connection, job_id: str, values: dict[str, Any]) -> None:
    """Insert a trial with the next `seq`.

    The caller has changed the job's row in this transaction: that lock keeps concurrent writers apart until the
    commit, so nobody sees a `seq` before all smaller ones.
    """
    last = sa.select(sa.func.coalesce(sa.func.max(trials.c.seq), -1)).where(trials.c.job_id == job_id)
    seq = last.scalar_subquery() + 1
    connection.execute(sa.insert(trials).values(job_id=job_id, seq=seq, at=database.clock(), **values))
