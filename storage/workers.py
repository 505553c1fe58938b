"""The workers that are alive: each registers itself and repeats a heartbeat every few seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

import sqlalchemy as sa

from bexp.storage.database import Database
from bexp.storage.jobs import JobState
from bexp.storage.tables import jobs, workers

LIVE_WITHIN = timedelta(seconds=15)
"""A worker that has not been seen for longer counts as gone."""

REPLAYED = ", replayed"
"""The end of the device's name of a worker that replays a recorded table, and takes only what the table answers."""

KEEP = timedelta(days=1)
"""A worker that went silent without shutting down stays in the list for so long."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's report about itself. Before a worker has had its devices, it knows neither their name nor memory."""

    id: str
    host: str
    pid: int
    device_kind: str
    device_name: str
    num_devices: int
    fingerprint: str
    """Of its HardwareSpec; empty until it is known."""
    memory_limit_bytes: int
    """The memory of a device that a job may use by default."""
    memory_bytes: int
    """The most memory of a device that a job may ask for."""
    targets: Mapping[str, str] = field(default_factory=dict)
    """The version of each target that it can measure, by name."""
    devices: str = ""
    """Their names: `cuda:0`, or `cuda:0+3` for that one and three more."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """The version of each library that a measurement depends on, by name."""
    held_by: str | None = None
    """The holder of the devices while the worker waits for them."""
    name: str = ""
    """If set, the worker takes only jobs whose `own_worker` is this name."""
    gpus: Sequence[Mapping[str, Any]] | None = None
    """Each of its GPUs as `device`, with `busy_share` (0..1) and `temperature_celsius` where NVML says them."""

    @property
    def is_replayed(self) -> bool:
        """Whether it replays a recorded table."""
        return self.device_name.endswith(REPLAYED)


class WorkerState(StrEnum):
    """The state of a worker."""

    IDLE = "idle"
    WAITING = "waiting"
    MEASURING = "measuring"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class KnownWorker:
    """A worker that lives, or was lost within a day.

    `job_id` is the job that it measures, or measured last; `model_name` and `job_started_at` are those of that job.
    """

    info: WorkerInfo
    state: WorkerState
    job_id: str | None
    model_name: str | None
    job_started_at: datetime | None
    started_at: datetime
    last_seen_at: datetime


def register_worker(database: Database, worker: WorkerInfo) -> None:
    """Enter a worker that is alive, or renew its entry; drop the entries of long dead workers."""
    with database.begin() as connection:
        connection.execute(sa.delete(workers).where(workers.c.last_seen_at < database.clock(-KEEP)))
        values = asdict(worker) | {"last_seen_at": database.now(connection)}
        renewed = connection.execute(sa.update(workers).where(workers.c.id == worker.id).values(values))
        if renewed.rowcount == 0:
            connection.execute(sa.insert(workers).values(**values, started_at=values["last_seen_at"]))


def forget_worker(database: Database, worker_id: str) -> None:
    """Remove a worker that shuts down."""
    with database.begin() as connection:
        connection.execute(sa.delete(workers).where(workers.c.id == worker_id))


def select_live(
    database: Database, connection: sa.Connection, live_within: timedelta = LIVE_WITHIN
) -> list[WorkerInfo]:
    """Return the workers that reported within the last `live_within`, ordered by id, within a transaction."""
    query = sa.select(workers).where(is_live(database, live_within)).order_by(workers.c.id)
    return [_info_of(row) for row in connection.execute(query)]


def is_live(database: Database, live_within: timedelta) -> sa.ColumnElement[bool]:
    """Return the condition of live workers. A report much later than now was made before the clock was set back."""
    return workers.c.last_seen_at.between(database.clock(-live_within), database.clock(LIVE_WITHIN))


def read_workers(database: Database, *, owner: str | None = None) -> list[KnownWorker]:
    """Return the workers that live, and those that were lost and not removed yet, ordered by id.

    A worker that shuts down is removed; a worker that is killed stays for a day. With `owner`, the jobs of other owners
    are left out.
    """
    alive = is_live(database, LIVE_WITHIN).label("alive")
    began = jobs.c.started_at.label("job_started_at")
    owned = sa.and_(jobs.c.worker == workers.c.id, jobs.c.state == JobState.RUNNING.value)
    query = (
        sa.select(workers, alive, jobs.c.id.label("job_id"), jobs.c.owner, jobs.c.model_name, began)
        .join(jobs, owned, isouter=True)
        .where(workers.c.last_seen_at >= database.clock(-KEEP))
        .order_by(workers.c.id, jobs.c.lease_expires_at)  # of several, the last one holds: others await another owner
    )
    with database.read() as connection:
        rows = {row.id: row for row in connection.execute(query)}
    return [_known_of(row, sees_job=owner in {None, row.owner}) for row in rows.values()]


def _known_of(row: sa.Row[Any], *, sees_job: bool) -> KnownWorker:
    return KnownWorker(
        info=_info_of(row),
        state=_state_of(row),
        job_id=row.job_id if sees_job else None,
        model_name=row.model_name if sees_job else None,
        job_started_at=row.job_started_at if sees_job else None,
        started_at=row.started_at,
        last_seen_at=row.last_seen_at,
    )


def _state_of(row: sa.Row[Any]) -> WorkerState:
    if not row.alive:
        return WorkerState.LOST
    if row.job_id is not None:
        return WorkerState.MEASURING
    return WorkerState.IDLE if row.held_by is None else WorkerState.WAITING


def _info_of(row: sa.Row[Any]) -> WorkerInfo:
    return WorkerInfo(**{part.name: getattr(row, part.name) for part in fields(WorkerInfo)})
