"""The finished trials of a job."""

from __future__ import annotations

import sqlalchemy as sa

from explorer.trials import Trial
from storage.database import Database
from storage.tables import trials


def read_trials(database: Database, job_id: str, *, after: int = -1, limit: int = 1000) -> list[Trial]:
    """Trials with `number` > `after`, in order, at most `limit`; none for a job that does not exist."""
    with database.read() as connection:
        return select_trials(connection, job_id, after=after, limit=limit)


def select_trials(
    connection: sa.Connection, job_id: str, *, after: int = -1, number: int | None = None, limit: int | None = None
) -> list[Trial]:
    """`read_trials` within a transaction, by default all of them; `number` asks for one."""
    query = sa.select(trials.c.trial).where(trials.c.job_id == job_id, trials.c.number > after)
    if number is not None:
        query = query.where(trials.c.number == number)
    documents = connection.scalars(query.order_by(trials.c.number).limit(limit))
    return [Trial.model_validate(document) for document in documents]


def insert_trial(database: Database, connection: sa.Connection, job_id: str, trial: Trial) -> None:
    """Insert a trial; the caller holds the job's row."""
    connection.execute(
        sa.insert(trials).values(
            job_id=job_id,
            number=trial.number,
            at=database.clock(),
            outcome=trial.measurement.outcome.value,
            trial=trial.model_dump(mode="json"),
        )
    )
