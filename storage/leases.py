"""Leases: the right of one worker to run and to write a job."""

from __future__ import annotations

from dataclasses import dataclass

from explorer.records.trial import Trial
from explorer.spec.request import ExplorationRequest
from storage.jobs import Job


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
    """The result of a heartbeat, by which a worker goes on or stops."""

    cancel_requested: bool


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
