"""The workers that are alive: each registers itself and repeats a heartbeat every few seconds."""

from __future__ import annotations

from collections.abc import Mapping
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
"""How long a worker stays in the list that went silent and did not shut down."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker reports about itself.

    `fingerprint` is that of its HardwareSpec. `targets` has the version of each target that it can measure, by name,
    and `versions` that of each library that a measurement depends on. `devices` names them: `cuda:0`, or `cuda:0+3` for
    that one and three more. `memory_limit_bytes` is what a job may use of a device by default, and `memory_bytes` what
    one may ask for at most. `held_by` says who has the devices while the worker waits for them. One that never had them
    knows neither name, fingerprint nor memory. A worker with a `name` is there for the jobs alone whose `own_worker` is
    that name.
    """

    id: str
    host: str
    pid: int
    device_kind: str
    device_name: str
    num_devices: int
    fingerprint: str
    memory_limit_bytes: int
    memory_bytes: int
    targets: Mapping[str, str] = field(default_factory=dict)
    devices: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    held_by: str | None = None
    name: str = ""

    @property
    def is_replayed(self) -> bool:
        """Whether it replays a recorded table."""
        return self.device_name.endswith(REPLAYED)


class WorkerState(StrEnum):
    """What a worker does."""

    IDLE = "idle"
    WAITING = "waiting"
    MEASURING = "measuring"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class KnownWorker:
    """A worker that lives, or that was lost within a day. `job_id` is the job that it measures, or measured last."""

    info: WorkerInfo
    state: WorkerState
    job_id: str | None
    started_at: datetime
    last_seen_at: datetime


def register_worker(database: Database, worker: WorkerInfo) -> None:
    """Enter a worker that is alive, or renew its entry; entries that are long dead are dropped."""
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
    """Return the workers that were seen within the last `live_within`, ordered by id, within a transaction."""
    query = sa.select(workers).where(is_live(database, live_within)).order_by(workers.c.id)
    return [_info_of(row) for row in connection.execute(query)]


def is_live(database: Database, live_within: timedelta) -> sa.ColumnElement[bool]:
    """Return the condition of live workers. One seen much later than now was so before the clock was set back."""
    return workers.c.last_seen_at.between(database.clock(-live_within), database.clock(LIVE_WITHIN))


def read_workers(
    database: Database, *, live_within: timedelta = LIVE_WITHIN, owner: str | None = None
) -> list[KnownWorker]:
    """Return the workers that live, and those that were lost and not removed yet, ordered by id.

    A worker that shuts down is removed. One that is killed stays for a day. With `owner`, the jobs of other owners are
    not named.
    """
    alive = is_live(database, live_within).label("alive")
    owned = sa.and_(jobs.c.worker == workers.c.id, jobs.c.state == JobState.RUNNING.value)
    query = (
        sa.select(workers, alive, jobs.c.id.label("job_id"), jobs.c.owner)
        .join(jobs, owned, isouter=True)
        .where(workers.c.last_seen_at >= database.clock(-KEEP))
        .order_by(workers.c.id, jobs.c.lease_expires_at)  # of several, the last one holds: others await another owner
    )
    with database.read() as connection:
        rows = {row.id: row for row in connection.execute(query)}
    return [
        KnownWorker(
            *(_info_of(row), _state_of(row)),
            row.job_id if owner in {None, row.owner} else None,
            *(row.started_at, row.last_seen_at),
        )
        for row in rows.values()
    ]


def _state_of(row: sa.Row[Any]) -> WorkerState:
    if not row.alive:
        return WorkerState.LOST
    if row.job_id is not None:
        return WorkerState.MEASURING
    return WorkerState.IDLE if row.held_by is None else WorkerState.WAITING


def _info_of(row: sa.Row[Any]) -> WorkerInfo:
    return WorkerInfo(**{part.name: getattr(row, part.name) for part in fields(WorkerInfo)})
