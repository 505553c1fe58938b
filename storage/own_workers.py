"""The worker that a command starts for its own job: it alone takes that job, as long as it lives."""

from __future__ import annotations

import sqlalchemy as sa

from bexp.storage.changes import has_no_worker
from bexp.storage.database import Database
from bexp.storage.jobs import JobState
from bexp.storage.matching import OWN_WORKER_TERM, has_live_own_worker
from bexp.storage.tables import jobs


def keep_job(database: Database, job_id: str, name: str) -> None:
    """Say that the worker called `name` lives, which then alone may take a job, as `reserve_job` says."""
    with database.begin() as connection:
        reserve_job(database, connection, job_id, name)


def reserve_job(database: Database, connection: sa.Connection, job_id: str, name: str) -> None:
    """Let the worker called `name` alone take a job for another OWN_WORKER_TERM; without a name any worker may.

    A job stays as it is that has ended, that another worker runs, or whose own worker lives and has another name.
    """
    is_free = has_no_worker(database) & sa.not_(has_live_own_worker(database))
    is_active = jobs.c.state.in_((JobState.QUEUED.value, JobState.RUNNING.value))
    here = (jobs.c.id == job_id, is_active, is_free | ((jobs.c.own_worker == name) & (jobs.c.own_worker != "")))
    until = database.clock(OWN_WORKER_TERM) if name else None
    connection.execute(sa.update(jobs).where(*here).values(own_worker=name, own_worker_until=until))
