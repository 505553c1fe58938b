"""Waiting jobs: the reasons why no live worker can run them, and their requests, which a worker may read in advance."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any

import sqlalchemy as sa
from pydantic import ValidationError

from bexp.explorer.records.event import EventCode, EventDraft
from bexp.explorer.request.request import ExplorationRequest
from bexp.storage.changes import change_jobs, end_job, has_no_worker
from bexp.storage.claims import HELD_BACK, ClaimQuota, find_claim_quotas, find_turns
from bexp.storage.database import Database
from bexp.storage.jobs import JobState, JobSummary
from bexp.storage.leases import is_held
from bexp.storage.matching import NEEDED, OWN_WORKER, STARTING, find_takers, has_live_own_worker, waiting_reason
from bexp.storage.tables import IS_QUEUED, events, jobs
from bexp.storage.workers import LIVE_WITHIN, WorkerInfo, select_live

MAX_WAIT = timedelta(days=7)
"""A job that no live worker can run stays in the queue for so long, unless the service sets another limit."""

DEVICE_HELD = "the device is in use"
"""The beginning of a reason: the workers that could run the job wait for their devices, which others have."""

BUSY = "each that can run it is busy"
"""The reason if the workers that could run the job measure others."""

HAS_WORKER = sa.or_(*map(jobs.c.waiting_reason.startswith, (HELD_BACK, DEVICE_HELD, BUSY)))
"""The condition of jobs that wait although live workers could run them."""

NOTED_AT_ONCE = 20
"""The most jobs whose reasons one transaction stores. More would keep others waiting for SQLite's write lock."""


def find_reason(database: Database, job_id: str) -> str | None:
    """Return the reason why no live worker can run a job now; None if one can."""
    with database.read() as connection:
        live, rows = select_overdue(database, connection, jobs.c.id == job_id, live_within=LIVE_WITHIN)
    return waiting_reason(rows[0], live) if rows else None


def select_overdue(
    database: Database, connection: sa.Connection, overdue: sa.ColumnElement[bool], *, live_within: timedelta
) -> tuple[list[WorkerInfo], list[sa.Row[*tuple[Any, ...]]]]:
    """Return the live workers and the `overdue` jobs, within a transaction."""
    live = select_live(database, connection, live_within)
    states = (is_held(database).label("is_held"), has_live_own_worker(database).label("own_is_alive"))
    columns = (jobs.c.id, jobs.c.owner, *NEEDED, jobs.c.report, jobs.c.waiting_reason, *states)
    return live, list(connection.execute(sa.select(*columns).where(overdue).order_by(jobs.c.created_at)))


def find_waiting(
    live: Sequence[WorkerInfo],
    overdue: Sequence[sa.Row[*tuple[Any, ...]]],
    quotas: Mapping[str, ClaimQuota] = MappingProxyType({}),
    busy: Collection[str] = (),
) -> list[tuple[str, str | None]]:
    """Return the `overdue` jobs whose stored reason for waiting is out of date, with the new reason.

    The reason is None when a live worker runs the job, or is free to. `quotas` are those of the owners, and `busy` are
    the ids of the workers that measure. Reasons from a quota and from busy workers stay until there is another one,
    because between two claims both are free for a moment. A job's own worker gives the reason that it waits for its
    device, which stays until the worker has the device.
    """
    changed = []
    takers_by_needs: dict[tuple[Any, ...], list[WorkerInfo]] = {}  # thousands of jobs have the same
    for row in overdue:
        new = None if row.is_held else waiting_reason(row, live)
        if new is None and not row.is_held:
            needs = tuple(getattr(row, column.name) for column in NEEDED)
            if needs not in takers_by_needs:
                takers_by_needs[needs] = _takers_of(row, live)
            new = _why_none_is_free(row, takers_by_needs[needs], quotas.get(row.owner), busy)
        if row.own_worker and _is_held_device(new if new != STARTING else row.waiting_reason):
            continue
        if new != row.waiting_reason:
            changed.append((row.id, new))
    return changed


def _why_none_is_free(
    row: sa.Row[*tuple[Any, ...]], takers: Sequence[WorkerInfo], quota: ClaimQuota | None, busy: Collection[str]
) -> str | None:
    """Return the reason why none of the live workers that can run a job takes it now; None if one may."""
    if quota is not None and quota.holds:
        return quota.reason
    if takers and all(worker.id in busy or worker.held_by is not None for worker in takers):
        return BUSY if any(worker.id in busy for worker in takers) else f"{DEVICE_HELD}: {takers[0].held_by}"
    stays = row.waiting_reason == BUSY or (quota is not None and row.waiting_reason == quota.reason)
    return row.waiting_reason if stays else None


def _is_held_device(reason: str | None) -> bool:
    return reason is not None and reason.startswith(DEVICE_HELD)


def _takers_of(row: Any, live: Sequence[WorkerInfo]) -> list[WorkerInfo]:
    """Return the live workers that would take a job, without those that replay what they may not be able to answer."""
    return [worker for worker in find_takers(row, live) if row.own_worker or not worker.is_replayed]


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """The place of a job among the `num_queued` ones that it waits with, counted from 1.

    `busy_until` is when the first of the workers that would take it has used the time budget of its present job. It is
    None if one of them is free, or if none has any of its budget left. `reason` says why no live worker can run it;
    it is None if one can.
    """

    place: int
    num_queued: int
    busy_until: datetime | None
    reason: str | None = None


def find_place(database: Database, of: JobSummary) -> QueuePlace | None:
    """Return the place of a job in the queue; None if it is not queued, or waits for its own worker alone."""
    return find_places(database, [of]).get(of.id)


def find_places(database: Database, of: Iterable[JobSummary]) -> dict[str, QueuePlace]:
    """Return the places in the queue, by id, of those of some jobs that have one as in `find_place`."""
    ids = [job.id for job in of if job.state is JobState.QUEUED]
    if not ids:
        return {}
    columns = (jobs.c.id, *NEEDED, jobs.c.report)
    with database.read() as connection:
        query = sa.select(*columns).where(jobs.c.id.in_(ids), IS_QUEUED, jobs.c.own_worker == "")
        rows = connection.execute(query).all()
        by_kind: dict[str | None, list[str]] = {}
        for row in rows:
            by_kind.setdefault(row.device_kind, []).append(row.id)
        places: dict[str, tuple[int, int]] = {}
        for kind, among in by_kind.items():
            places |= find_turns(database, connection, kind, among)
        live = select_live(database, connection)
        budget = sa.func.coalesce(jobs.c.request["budget"]["max_seconds"].as_float(), 0.0)
        running = sa.select(jobs.c.worker, jobs.c.started_at, budget).where(
            is_held(database), jobs.c.worker.in_([worker.id for worker in live])
        )
        ends = {row[0]: row[1] + timedelta(seconds=row[2]) for row in connection.execute(running)}
        now = database.now(connection)

    def busy_until(takers: Sequence[WorkerInfo]) -> datetime | None:
        is_one_free = any(worker.id not in ends and worker.held_by is None for worker in takers)
        later = (end for worker in takers if (end := ends.get(worker.id)) is not None and end > now)
        return None if is_one_free else min(later, default=None)

    return {
        row.id: QueuePlace(*places[row.id], busy_until(_takers_of(row, live)), waiting_reason(row, live))
        for row in rows
        if row.id in places
    }


def _select_busy(database: Database, connection: sa.Connection) -> frozenset[str]:
    """Return the ids of the workers that measure a job."""
    return frozenset(connection.scalars(sa.select(jobs.c.worker).where(is_held(database))))


def note_reasons(database: Database, *, live_within: timedelta, grace: timedelta) -> None:
    """Append an event to each job that has waited for `grace`, whenever its reason for waiting changes.

    The end of a reason is an event as well, so that no log ends with a reason that no longer holds.
    """
    with database.read() as connection:
        overdue = sa.or_(
            (jobs.c.state == JobState.QUEUED.value)
            & sa.not_(jobs.c.queued_at.between(database.clock(-grace), database.clock(grace))),  # it may come meanwhile
            (jobs.c.state == JobState.RUNNING.value) & (jobs.c.lease_expires_at < database.clock(-grace)),
            is_held(database) & jobs.c.waiting_reason.is_not(None),  # its worker was frozen and goes on
        )
        live, rows = select_overdue(database, connection, overdue, live_within=live_within)
        quotas = find_claim_quotas(database, connection)
        busy = _select_busy(database, connection)
    changed = find_waiting(live, rows, quotas, busy)
    for first in range(0, len(changed), NOTED_AT_ONCE):
        by_reason: dict[str | None, list[str]] = {}
        for job_id, reason in changed[first : first + NOTED_AT_ONCE]:
            by_reason.setdefault(reason, []).append(job_id)
        with database.begin() as connection:
            for reason, job_ids in by_reason.items():
                _note_reason(database, connection, job_ids, reason)


def note_reason(database: Database, job_id: str, reason: str) -> None:
    """Append an event with the reason why a job waits, unless the last event gave it, or a worker runs the job."""
    with database.begin() as connection:
        _note_reason(database, connection, [job_id], reason)


def _note_reason(database: Database, connection: sa.Connection, job_ids: Sequence[str], reason: str | None) -> None:
    conditions = [jobs.c.id.in_(job_ids), jobs.c.waiting_reason.is_distinct_from(reason)]
    if reason is None:
        message = "A worker can run it now"
    else:
        conditions.append(has_no_worker(database))
        has_worker = reason.startswith((HELD_BACK, DEVICE_HELD, OWN_WORKER))
        message = f"Waiting: {reason}" if has_worker else f"Waiting for a worker: {reason}"
    draft = EventDraft(code=EventCode.WAITING, message=message, data={"reason": reason})
    change_jobs(database, connection, conditions, draft, waiting_reason=reason)


def end_overdue(database: Database, max_wait: timedelta, *, noted_for: timedelta) -> None:
    """End each job that has been in the queue for `max_wait` and has a reason why no worker could run it.

    A job that was begun stays, because a worker like its first may come; but a job's own worker does not come again.
    The reason must be older than `noted_for`: after a host was asleep, or its clock was set forward, all workers seem
    to be gone until they report.
    """
    just_noted = sa.select(events.c.seq).where(
        events.c.job_id == jobs.c.id,
        events.c.code == int(EventCode.WAITING),
        events.c.at > database.clock(-noted_for),
    )
    overdue = [
        sa.or_(jobs.c.state == JobState.QUEUED.value, has_no_worker(database) & (jobs.c.own_worker != "")),
        jobs.c.waiting_reason.is_not(None),
        sa.not_(HAS_WORKER),
        jobs.c.queued_at < database.clock(-max_wait),
        sa.not_(sa.exists(just_noted)),
    ]
    with database.read() as connection:
        rows = connection.execute(sa.select(jobs.c.id, jobs.c.waiting_reason).where(*overdue)).all()
    for job_id, reason in rows:
        error = f"no worker could run it within {describe_duration(max_wait)}: {reason}"
        with database.begin() as connection:
            end_job(database, connection, [jobs.c.id == job_id, *overdue], JobState.FAILED, error)


def describe_duration(duration: timedelta) -> str:
    """Return a duration for a person: `90 s`, `2 h`, `7 days`."""
    seconds = duration.total_seconds()
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size and seconds % size == 0:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:g} s"


def list_waiting_ids(database: Database, target: str) -> list[str]:
    """Return the ids of the jobs of `target` that no worker owns."""
    with database.read() as connection:
        query = sa.select(jobs.c.id).where(has_no_worker(database), jobs.c.target == target)
        return list(connection.scalars(query))


def read_requests(database: Database, job_ids: Collection[str]) -> dict[str, ExplorationRequest | None]:
    """Return the requests of these jobs by id; None for a request of another version that this one cannot read."""
    with database.read() as connection:
        rows = connection.execute(sa.select(jobs.c.id, jobs.c.request).where(jobs.c.id.in_(job_ids))).all()
    return {row.id: _request_in(row.request) for row in rows}


def _request_in(document: object) -> ExplorationRequest | None:
    try:
        return ExplorationRequest.model_validate(document)
    except ValidationError:
        return None
