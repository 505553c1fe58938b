"""Leases: the right of one worker to run and to write a job, its duration, and the number of tries of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import sqlalchemy as sa

from bexp.explorer.records.trial import Trial
from bexp.explorer.request.request import ExplorationRequest
from bexp.storage.database import Database
from bexp.storage.jobs import Job, JobState
from bexp.storage.tables import jobs

LONGEST_PAUSE = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """The duration of leases, and the limits on tries. A stored trial sets both counts of tries to zero.

    Attributes:
        lease: how long a worker may be silent before another takes its job.
        max_attempts: a job is given up after this number of attempts that ended with the worker, its device or its
            host, and stored no trial.
        max_faults: a job fails after this number of internal errors of its own search, with no stored trial between.
        retry_pause: how long a job that was put back waits at first; the pause doubles with each attempt, up to
            LONGEST_PAUSE.
    """

    lease: timedelta = timedelta(seconds=30)
    max_attempts: int = 20
    max_faults: int = 3
    retry_pause: timedelta = timedelta(seconds=1)

    def pause(self, num_failures: int) -> timedelta:
        """Return the pause of a job after `num_failures` failures in a row."""
        doublings = min(max(0, num_failures - 1), 16)
        return min(self.retry_pause * (1 << doublings), LONGEST_PAUSE)


def read_queue_settings(variables: Mapping[str, str]) -> QueueSettings:
    """Read BEXP_LEASE_SECONDS, BEXP_MAX_ATTEMPTS, BEXP_MAX_FAULTS and BEXP_RETRY_SECONDS.

    Raises:
        ValueError: one of them is out of range.
    """
    default = QueueSettings()
    return QueueSettings(
        lease=read_seconds(variables, "BEXP_LEASE_SECONDS", default.lease, least=1.0),
        max_attempts=_read_count(variables, "BEXP_MAX_ATTEMPTS", default.max_attempts),
        max_faults=_read_count(variables, "BEXP_MAX_FAULTS", default.max_faults),
        retry_pause=read_seconds(variables, "BEXP_RETRY_SECONDS", default.retry_pause, least=0.0),
    )


def read_seconds(variables: Mapping[str, str], name: str, default: timedelta, *, least: float) -> timedelta:
    """Return a variable as a duration; an empty one counts as not set.

    Raises:
        ValueError: it is no number of seconds from `least` to 86400, a day (LONGEST_LEASE).
    """
    given = variables.get(name)
    if not given:
        return default
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not least <= seconds <= 86400:
        raise ValueError(f"{name} must be a number of seconds from {least:g} to 86400")
    return timedelta(seconds=seconds)


def _read_count(variables: Mapping[str, str], name: str, default: int) -> int:
    given = variables.get(name)
    if not given:
        return default
    if not (given.isascii() and given.isdigit() and len(given) < 9 and int(given) >= 1):
        raise ValueError(f"{name} must be a number from 1 to 99999999")
    return int(given)


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
