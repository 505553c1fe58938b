"""Waiting jobs: the reasons why no live worker can run them, and their requests, which a worker may read in advance."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import sqlalchemy as sa
from pydantic import ValidationError

from bexp.explorer.records.event import EventCode, EventDraft
from bexp.explorer.request.request import ExplorationRequest
from bexp.storage.changes import change_jobs, end_job, has_no_worker
from bexp.storage.claims import HELD_BACK, ClaimQuota, find_claim_quotas
from bexp.storage.database import Database
from bexp.storage.jobs import JobState
from bexp.storage.leases import is_held
from bexp.storage.matching import NEEDED, OWN_WORKER, STARTING, has_live_own_worker, waiting_reason
from bexp.storage.tables import events, jobs
from bexp.storage.workers import LIVE_WITHIN, WorkerInfo, select_live

MAX_WAIT = timedelta(days=7)
"""A job that no live worker can run stays in the queue for so long, unless the service sets another limit."""

DEVICE_HELD = "the device is in use"
"""The beginning of a reason that a job's own worker gives."""

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
) -> list[tuple[str, str | None]]:
    """Return the `overdue` jobs whose stored reason for waiting is out of date, with the new reason.

    The reason is None when a live worker runs the job, or could run it and is merely busy. `quotas` are those of the
    owners. A reason from a quota stays while the quota is the same, because between two claims the quota is free for a
    moment. The reason of a worker that waits for its device stays until the worker has the device.
    """
    changed = []
    for row in overdue:
        new = None if row.is_held else waiting_reason(row, live)
        quota = quotas.get(row.owner)
        if new is None and not row.is_held and quota is not None:
            new = quota.reason if quota.holds or row.waiting_reason == quota.reason else None
        if new == STARTING and row.waiting_reason is not None and row.waiting_reason.startswith(DEVICE_HELD):
            continue
        if new != row.waiting_reason:
            changed.append((row.id, new))
    return changed


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
    changed = find_waiting(live, rows, quotas)
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
    """End each job that has been in the queue for `max_wait` and has a reason that no worker could run it.

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
        sa.not_(jobs.c.waiting_reason.startswith(HELD_BACK)),
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
