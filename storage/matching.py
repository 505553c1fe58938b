"""The match of jobs and workers. A claim asks the database, and a reason for waiting names what no worker has.

The worker that a command starts for its own job takes that job alone, and no other takes it as long as it lives.

A GPU goes before a CPU: where a job names no kind of device, a CPU leaves it to a live GPU that could run it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from pydantic import ValidationError

from bexp.explorer.cost.step import GIB
from bexp.explorer.model.target import TRANSFORMERS
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.request.request import ExplorationRequest
from bexp.storage.changes import has_no_worker
from bexp.storage.database import Database
from bexp.storage.jobs import JobState
from bexp.storage.notifications import QUEUED_JOBS, notify
from bexp.storage.tables import jobs
from bexp.storage.workers import WorkerInfo

MEMORY_TOLERANCE = 0.1
"""The free memory of a host or a GPU is never twice the same, and a card of 80 GB has 79 GiB."""

OWN_WORKER = "its own worker "
"""The beginning of a reason that only the command which follows a job can change."""
STARTING = "its own worker is starting"
ENDED = "its own worker has ended"

OWN_WORKER_TERM = timedelta(seconds=30)
"""An own worker counts as alive for so long after its last report, or after its command has named it."""


@dataclass(frozen=True, slots=True)
class Need:
    """A need of a job: the value in `column`, or nothing if that is null."""

    column: sa.Column[Any]
    of_worker: Callable[[WorkerInfo], Any]
    """The value that a worker offers."""
    is_met: Callable[[Any, Any], Any]
    """Whether an offer meets the need, which is the column in a claim, and the value of a row in a reason."""
    missing: Callable[[Any], tuple[str, str]]
    """The name of the need, and a hint or an empty text."""

    def condition(self, offered: Any) -> sa.ColumnElement[bool]:
        """Return the condition of jobs whose need is met by what a worker offers."""
        met: sa.ColumnElement[bool] = self.is_met(self.column, offered)
        return sa.or_(self.column.is_(None), met) if self.column.nullable else met

    def is_met_by(self, job: Any, worker: WorkerInfo) -> bool:
        """Return whether a worker meets the need of a job, which is a row or has the same names."""
        needed = getattr(job, self.column.name)
        return needed is None or bool(self.is_met(needed, self.of_worker(worker)))


def _is_among(needed: Any, offered: Sequence[str]) -> Any:
    return needed.in_(offered) if isinstance(needed, sa.ColumnElement) else needed in offered


def _describe_target(job: Any) -> tuple[str, str]:
    how = " (it needs pip install 'bexp[transformers]')" if job.target == TRANSFORMERS else ""
    return f"the target '{job.target}'", how


def _describe_kind(job: Any) -> tuple[str, str]:
    device = "cuda:0" if job.device_kind == "cuda" else job.device_kind
    return f"a {job.device_kind} device", f" (`bexp worker --device {device}` starts one)"


def _describe_pinned(job: Any) -> tuple[str, str]:
    try:
        hardware = DeviceReport.model_validate(job.report).hardware.describe()
    except ValidationError:
        hardware = "another version stored a description that this one cannot read"
    return "the hardware that this exploration started on", f" ({hardware})"


OWN = Need(jobs.c.own_worker, lambda worker: worker.name, operator.eq, lambda _: ("", ""))
"""A worker with a name takes only the jobs that name it; any other worker takes those that name none."""

NEEDS = (
    OWN,
    Need(
        jobs.c.device_kind,
        lambda worker: worker.device_kind,
        operator.eq,
        _describe_kind,
    ),
    Need(
        jobs.c.devices_needed,
        lambda worker: worker.num_devices,
        operator.le,
        lambda job: (f"{job.devices_needed} devices", ""),
    ),
    Need(
        jobs.c.memory_needed_bytes,
        lambda worker: round(worker.memory_bytes / (1 - MEMORY_TOLERANCE)),
        operator.le,
        lambda job: (f"{job.memory_needed_bytes / GIB:g} GiB of memory", ""),
    ),
    Need(jobs.c.target, lambda worker: tuple(sorted(worker.targets)), _is_among, _describe_target),
    Need(jobs.c.fingerprint, lambda worker: worker.fingerprint, operator.eq, _describe_pinned),
)

NEEDED = tuple(need.column for need in NEEDS)


def needs_of(request: ExplorationRequest) -> dict[str, Any]:
    """Return the columns of a new job for its needs, without that for its own worker."""
    limit = request.memory_limit_gib
    return {
        "device_kind": request.device_kind,
        "devices_needed": request.devices.needed(),
        "memory_needed_bytes": None if limit is None else round(limit * GIB),
        "target": request.target_name,
        "fingerprint": None,
    }


def can_run(by: WorkerInfo) -> sa.ColumnElement[bool]:
    """Return the condition of the jobs that a worker can run."""
    return _can_run(_offer(by))


def is_left_to_gpus(by: WorkerInfo, live: Iterable[WorkerInfo]) -> sa.ColumnElement[bool]:
    """Return the condition of the jobs that a worker leaves to live GPUs, whatever they do now."""
    offers = {_offer(worker) for worker in live if is_gpu(worker)} if by.device_kind == "cpu" else set()
    return jobs.c.device_kind.is_(None) & sa.or_(sa.false(), *map(_can_run, offers))


def find_takers(job: Any, live: Iterable[WorkerInfo]) -> list[WorkerInfo]:
    """Return the live workers that would take a job, which has the names of `NEEDED`."""
    able = [worker for worker in live if all(need.is_met_by(job, worker) for need in NEEDS)]
    gpus = [worker for worker in able if is_gpu(worker)]
    return gpus if job.device_kind is None and gpus else able


def is_gpu(worker: WorkerInfo) -> bool:
    """Return whether a worker measures on a GPU. A recorded table does not count: it answers few jobs."""
    return worker.device_kind != "cpu" and not worker.is_replayed


def has_live_own_worker(database: Database) -> sa.ColumnElement[bool]:
    """Return the condition of the jobs whose own worker lives. A longer term was set before a clock was set back."""
    until = jobs.c.own_worker_until.between(database.clock(), database.clock(2 * OWN_WORKER_TERM))
    return sa.and_(jobs.c.own_worker != "", jobs.c.own_worker_until.is_not(None), until)


def waiting_reason(job: Any, live: Sequence[WorkerInfo]) -> str | None:
    """Return the reason why none of the live workers can run a job, or None if one can.

    The row of the job has the columns `NEEDED`, its report, and `own_is_alive` of `has_live_own_worker`. A worker that
    replays a table may be unable to answer the job, unless the job started there.
    """
    is_bound = job.fingerprint is not None or job.own_worker
    able = [worker for worker in live if is_bound or not worker.is_replayed]
    for need in NEEDS:
        able = [worker for worker in able if need.is_met_by(job, worker)]
        if not able:
            missing = _describe_missing(job, need)
            return missing if is_bound or not find_takers(job, live) else _with_replays(missing)
    return None


def _with_replays(missing: str) -> str:
    """Return the reason where replayed tables may answer the job in place of a worker that measures."""
    return f"{missing}, apart from recorded tables that are replayed: each takes what it can answer"


def _describe_missing(job: Any, need: Need) -> str:
    if need is OWN:
        return "none is running" if not job.own_worker else STARTING if job.own_is_alive else ENDED
    thing, detail = need.missing(job)
    return f"{OWN_WORKER}is none with {thing}{detail}" if job.own_worker else f"none with {thing} is running{detail}"


def _offer(by: WorkerInfo) -> tuple[Any, ...]:
    return tuple(need.of_worker(by) for need in NEEDS)


def _can_run(offer: Sequence[Any]) -> sa.ColumnElement[bool]:
    return sa.and_(*(need.condition(offered) for need, offered in zip(NEEDS, offer, strict=True)))


def keep_job(database: Database, job_id: str, name: str) -> None:
    """Report that the worker called `name` lives, so that it alone may take a job, as in `reserve_job`."""
    with database.begin() as connection:
        reserve_job(database, connection, job_id, name)


def share_job(database: Database, job_id: str, name: str) -> None:
    """Let any worker take a job that is reserved for the worker called `name`, which has ended."""
    with database.begin() as connection:
        here = (jobs.c.id == job_id, jobs.c.own_worker == name)
        connection.execute(sa.update(jobs).where(*here).values(own_worker="", own_worker_until=None))
        notify(database, connection, QUEUED_JOBS)


def reserve_job(database: Database, connection: sa.Connection, job_id: str, name: str) -> None:
    """Let only the worker called `name` take a job for another OWN_WORKER_TERM; without a name, any worker may.

    Nothing changes if the job has ended, if another worker runs it, or if its own worker lives and has another name.
    """
    is_free = has_no_worker(database) & sa.not_(has_live_own_worker(database))
    is_active = jobs.c.state.in_((JobState.QUEUED.value, JobState.RUNNING.value))
    here = (jobs.c.id == job_id, is_active, is_free | ((jobs.c.own_worker == name) & (jobs.c.own_worker != "")))
    until = database.clock(OWN_WORKER_TERM) if name else None
    connection.execute(sa.update(jobs).where(*here).values(own_worker=name, own_worker_until=until))
