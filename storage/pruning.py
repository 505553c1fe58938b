"""Retention: finished jobs are deleted by age and by count, with their events, trials, run reports and studies."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta

import sqlalchemy as sa

from bexp.storage.audit import Action, note_action
from bexp.storage.database import Database
from bexp.storage.jobs import JobState, get_summary, select_row
from bexp.storage.owners import LOCAL, Caller
from bexp.storage.tables import jobs

_FINAL = [state.value for state in JobState if state.is_final]

_BATCH = 20
"""Jobs a transaction, so that nobody waits long for the lock."""


class JobNotFinishedError(ValueError):
    """A job that has not ended cannot be deleted."""

    def __init__(self, job_id: str, state: JobState) -> None:
        super().__init__(f"exploration {job_id} is {state}")
        self.job_id = job_id
        self.state = state


def find_prunable(database: Database, *, older_than: timedelta | None = None, keep: int | None = None) -> list[str]:
    """Return the ids of finished jobs that retention does not keep, oldest first.

    Args:
        database: the database of the jobs.
        older_than: a job that finished earlier is not kept; None: age does not matter.
        keep: the number of finished jobs to keep; None: any number. Of the owner with the most jobs, the oldest are not
            kept, so that an owner with many jobs does not displace those of another.
    """
    newest_first = (jobs.c.finished_at.desc(), jobs.c.id.desc())
    place_of_owner = sa.func.row_number().over(partition_by=jobs.c.owner, order_by=newest_first)
    query = sa.select(jobs.c.id, jobs.c.finished_at).where(jobs.c.state.in_(_FINAL))
    with database.read() as connection:
        rows = connection.execute(query.order_by(place_of_owner, *newest_first)).all()
        now = database.now(connection)
    prunable = [
        row
        for place, row in enumerate(rows)
        if (keep is not None and place >= keep) or (older_than is not None and row.finished_at < now - older_than)
    ]
    return [row.id for row in sorted(prunable, key=lambda row: (row.finished_at, row.id))]


def prune(database: Database, job_ids: list[str]) -> None:
    """Delete finished jobs and all that belongs to them; a job that is not finished stays."""
    _drop_studies(database, job_ids)
    for start in range(0, len(job_ids), _BATCH):
        batch = job_ids[start : start + _BATCH]
        with database.begin() as connection:
            connection.execute(sa.delete(jobs).where(jobs.c.id.in_(batch), jobs.c.state.in_(_FINAL)))


def delete_job(database: Database, job_id: str, *, by: Caller = LOCAL) -> None:
    """Delete a finished job and all that belongs to it.

    Raises:
        JobNotFoundError: there is no such job that the caller sees.
        JobNotFinishedError: it has not ended.
    """
    _check_final(job_id, get_summary(database, job_id, owner=by.sees).state)
    _drop_studies(database, [job_id])
    with database.begin() as connection:  # meanwhile it may have been resumed, or deleted by somebody else
        _check_final(job_id, JobState(select_row(connection, job_id, lock=True, owner=by.sees).state))
        connection.execute(sa.delete(jobs).where(jobs.c.id == job_id))
        note_action(database, connection, by, Action.DELETE, job_id)


def _check_final(job_id: str, state: JobState) -> None:
    if not state.is_final:
        raise JobNotFinishedError(job_id, state)


def drop_finished_studies(database: Database) -> int:
    """Drop the Optuna studies of all finished jobs, which can be written again; return how many were dropped."""
    return _drop_studies(database, set(find_prunable(database, keep=0)))


def _drop_studies(database: Database, job_ids: Collection[str]) -> int:
    from bexp.storage.studies import drop_studies  # noqa: PLC0415 - Optuna takes long to import

    return drop_studies(database, job_ids)
