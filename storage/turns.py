"""Which job is next: owners take turns, and within an owner the job of the highest priority is first.

The owner whose jobs hold the fewest devices is next; among equals, the one whose last claim was longest ago. An owner
with a thousand queued jobs thus delays another by one claim at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from storage.database import Database
from storage.jobs import JobState
from storage.quotas import EVERYBODY, quota_of, select_quotas
from storage.tables import jobs, quotas, usage

HELD_BACK = "the quota of owner "
"""How a reason for waiting begins that no worker can change."""


def select_next(database: Database, conditions: Sequence[sa.ColumnElement[bool]]) -> sa.Select[tuple[str]]:
    """Return the query for the id of the next job among those that meet `conditions`; it locks the job's row."""
    held = _select_held(database).cte("held")
    own, other = quotas.alias("own"), quotas.alias("other")

    def limit(name: str) -> sa.ColumnElement[int]:
        return sa.case((own.c.owner.is_not(None), own.c[name]), else_=other.c[name])

    booked = sa.case((usage.c.day == _today(database), usage.c.device_seconds), else_=0.0)
    used = booked + sa.func.coalesce(held.c.device_seconds, 0.0)
    running = sa.func.coalesce(held.c.num_jobs, 0)
    sources = (
        jobs.outerjoin(held, held.c.owned_by == jobs.c.owned_by)
        .outerjoin(usage, usage.c.owner == jobs.c.owned_by)
        .outerjoin(own, own.c.owner == jobs.c.owned_by)
        .outerjoin(other, other.c.owner == EVERYBODY)
    )
    return (
        sa.select(jobs.c.id)
        .select_from(sources)
        .where(
            *conditions,
            sa.func.coalesce(running < limit("max_running"), sa.true()),
            sa.func.coalesce(used < limit("max_device_seconds"), sa.true()),
        )
        .order_by(
            sa.func.coalesce(held.c.num_devices, 0),
            usage.c.claimed_at.nulls_first(),
            jobs.c.priority.desc(),
            jobs.c.created_at,
            jobs.c.id,
        )
        .limit(1)
        .with_for_update(of=jobs, skip_locked=True)
    )


def take_turn(database: Database, connection: sa.Connection, owner: str) -> bool:
    """Note that a worker has just taken a job of `owner`; return false if that is one more than its quota allows.

    The row stays locked until the transaction ends, so that two claims at once do not both take the last place.
    """
    insert = postgresql.insert(usage) if database.is_postgresql else sqlite.insert(usage)
    new = insert.values(owner=owner, claimed_at=database.clock(), day=_today(database), device_seconds=0.0)
    same_day = usage.c.day == new.excluded.day
    values = {
        "claimed_at": new.excluded.claimed_at,
        "day": new.excluded.day,
        "device_seconds": sa.case((same_day, usage.c.device_seconds), else_=0.0),
    }
    connection.execute(new.on_conflict_do_update(index_elements=[usage.c.owner], set_=values))
    limit = quota_of(select_quotas(connection), owner).max_running
    if limit is None:
        return True
    mine = sa.select(sa.func.count()).where(_is_held(database), jobs.c.owned_by == owner)
    return (connection.scalar(mine) or 0) <= limit


def book(database: Database, connection: sa.Connection, owner: str, claimed_at: datetime, num_devices: int) -> None:
    """Book the device seconds of a lease that ends now on this day."""
    now = database.now(connection)
    seconds = max(0.0, (now - claimed_at).total_seconds()) * num_devices
    today = now.astimezone(UTC).date()
    kept = sa.case((usage.c.day == today, usage.c.device_seconds), else_=0.0)
    connection.execute(sa.update(usage).where(usage.c.owner == owner).values(day=today, device_seconds=kept + seconds))


def held_since(database: Database) -> sa.ColumnElement[datetime]:
    """Return when the live lease of a job began. After a lost lease it is null: its time is not the owner's fault."""
    return sa.case((_is_held(database), jobs.c.claimed_at))


def find_held_back(database: Database, connection: sa.Connection) -> dict[str, tuple[str, bool]]:
    """Return for each owner with a quota on claims what a waiting job says of it, and whether it holds now."""
    found = select_quotas(connection)
    if all(quota.max_running is None and quota.max_device_seconds is None for quota in found.values()):
        return {}
    today = database.now(connection).astimezone(UTC).date()
    held = {row.owned_by: row for row in connection.execute(_select_held(database))}
    booked = {row.owner: row.device_seconds for row in connection.execute(sa.select(usage).where(usage.c.day == today))}
    waiting = sa.select(jobs.c.owned_by).where(jobs.c.state == JobState.QUEUED.value).distinct()
    reasons = {}
    for owner in connection.scalars(waiting):
        quota, now = quota_of(found, owner), held.get(owner)
        used = booked.get(owner, 0.0) + (now.device_seconds if now else 0.0)
        if quota.max_device_seconds is not None and used >= quota.max_device_seconds:
            limit = f"{quota.max_device_seconds} device seconds a day, all used on {today} (UTC)"
            reasons[owner] = (f"{HELD_BACK}'{owner}': {limit}", True)
        elif quota.max_running is not None:
            limit = f"{quota.max_running} running at a time"
            reasons[owner] = (f"{HELD_BACK}'{owner}': {limit}", (now.num_jobs if now else 0) >= quota.max_running)
    return reasons


def _is_held(database: Database) -> sa.ColumnElement[bool]:
    return (jobs.c.state == JobState.RUNNING.value) & (jobs.c.lease_expires_at > database.clock())


def _select_held(database: Database) -> sa.Select[Any]:
    """Return the query for what the jobs of each owner hold now: their number, devices, and device seconds so far."""
    if database.is_postgresql:
        seconds: sa.ColumnElement[float] = sa.extract("epoch", database.clock() - jobs.c.claimed_at)
    else:
        seconds = (sa.func.julianday(database.clock()) - sa.func.julianday(jobs.c.claimed_at)) * 86_400
    device_seconds = sa.func.coalesce(sa.cast(seconds, sa.Float), 0.0) * jobs.c.devices_needed
    return (
        sa.select(
            jobs.c.owned_by,
            sa.func.count().label("num_jobs"),
            sa.func.sum(jobs.c.devices_needed).label("num_devices"),
            sa.func.sum(device_seconds).label("device_seconds"),
        )
        .where(_is_held(database))
        .group_by(jobs.c.owned_by)
    )


def _today(database: Database) -> sa.ColumnElement[date]:
    if database.is_postgresql:
        return sa.cast(sa.func.timezone("UTC", sa.func.clock_timestamp()), sa.Date)
    return sa.literal(datetime.now(UTC).date(), sa.Date)
