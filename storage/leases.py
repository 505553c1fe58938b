"""Leases: the right of one worker to run and to write a job."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import sqlalchemy as sa

from bexp.explorer.records.trial import Trial
from bexp.explorer.request.request import ExplorationRequest
from bexp.storage.database import Database
from bexp.storage.jobs import Job, JobState
from bexp.storage.tables import jobs

LONGEST_LEASE = timedelta(days=1)
"""The longest lease. A lease that lasts for twice as long was given before the clock was set back."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write to a job. `attempt` grows with every claim, so an old lease writes nothing."""

    job_id: str
    worker: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A job to run, and the trials that earlier leases have measured."""

    job: Job
    request: ExplorationRequest
    lease: Lease
    history: tuple[Trial, ...]


@dataclass(frozen=True, slots=True)
class HeartbeatStatus:
    """The result of a heartbeat: the worker goes on, or stops."""

    cancel_requested: bool


def is_held(database: Database) -> sa.ColumnElement[bool]:
    """Return the condition of jobs that a worker runs under a lease which has not run out.

    The upper end has a margin. A statement may have read the clock long before the lease was given, and clocks are
    corrected by a little all the time.
    """
    live = jobs.c.lease_expires_at.between(database.clock(), database.clock(2 * LONGEST_LEASE))
    return (jobs.c.state == JobState.RUNNING.value) & live


class LeaseLostError(RuntimeError):
    """Another worker has the job, or it has ended, so nothing can be written under this lease."""

    def __init__(self, lease: Lease) -> None:
        super().__init__(f"worker {lease.worker} no longer owns exploration {lease.job_id} (attempt {lease.attempt})")
        self.lease = lease


class HardwareMismatchError(RuntimeError):
    """The job was started on other hardware than the worker has."""

    def __init__(self, job_id: str, pinned: str, offered: str) -> None:
        super().__init__(f"exploration {job_id} was started on {pinned}; this worker has {offered}")
        self.job_id = job_id
