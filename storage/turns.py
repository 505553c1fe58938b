"""Which job is next: owners take turns, and within an owner the job of the highest priority is first.

The owner whose jobs hold the fewest devices is next; among equals, the one whose last claim was longest ago. An owner
with a thousand queued jobs thus delays another by one claim at most.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from bexp.storage.database import Database
from bexp.storage.jobs import JobState
from bexp.storage.leases import is_held
from bexp.storage.quotas import quota_of, select_quotas
from bexp.storage.tables import jobs, usage

HELD_BACK = "the quota of owner "
"""How a reason for waiting begins that no worker can change."""

_CLAIMS = int.from_bytes(b"bexptake", "big")
"""The number of PostgreSQL's advisory lock for claims."""

Conditions = Sequence[sa.ColumnElement[bool]]


@dataclass(frozen=True, slots=True)
class ClaimQuota:
    """What a waiting job of an owner says of the owner's quota, and whether the quota holds it back now."""

    reason: str
    holds: bool


def find_next(database: Database, connection: sa.Connection, conditions: Conditions) -> sa.Select[tuple[str]] | None:
    """Return the query for the id of the next job among those that meet `conditions`; it locks the job's row.

    Returns null if there is none. `connection` only reads, so that an idle worker takes no lock.
    """
    held_back = [owner for owner, quota in find_claim_quotas(database, connection).items() if quota.holds]
    if held_back:
        conditions = (*conditions, jobs.c.owned_by.not_in(held_back))
    if connection.execute(sa.select(jobs.c.id).where(*conditions).limit(1)).first() is None:
        return None
    held = (
        sa.select(jobs.c.owned_by, sa.func.sum(jobs.c.devices_needed).label("num_devices"))
        .where(is_held(database))
        .group_by(jobs.c.owned_by)
        .subquery("held")
    )
    return (
        sa.select(jobs.c.id)
        .select_from(
            jobs.outerjoin(held, held.c.owned_by == jobs.c.owned_by).outerjoin(usage, usage.c.owner == jobs.c.owned_by)
        )
        .where(*conditions)
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


def await_turn(database: Database, connection: sa.Connection) -> None:
    """Let claims choose one after the other; those that choose at once would all choose the same owner.

    On SQLite the transaction holds the write lock already.
    """
    if database.is_postgresql:
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_CLAIMS)))


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
    mine = sa.select(sa.func.count()).where(is_held(database), jobs.c.owned_by == owner)
    return (connection.scalar(mine) or 0) <= limit


def book(database: Database, connection: sa.Connection, owner: str, claimed_at: datetime, num_devices: int) -> None:
    """Book the device seconds of a lease that ends now on this day."""
    now = database.now(connection)
    seconds = _device_seconds(now, claimed_at, num_devices)
    today = now.astimezone(UTC).date()
    kept = sa.case((usage.c.day == today, usage.c.device_seconds), else_=0.0)
    connection.execute(sa.update(usage).where(usage.c.owner == owner).values(day=today, device_seconds=kept + seconds))


def held_since(database: Database) -> sa.ColumnElement[datetime]:
    """Return when the live lease of a job began. After a lost lease it is null: its time is not the owner's fault."""
    return sa.case((is_held(database), jobs.c.claimed_at))


def find_claim_quotas(database: Database, connection: sa.Connection) -> dict[str, ClaimQuota]:
    """Return what the quotas mean for claims, for each owner that has jobs and such a quota."""
    found = select_quotas(connection)
    if all(quota.max_running is None and quota.max_device_seconds is None for quota in found.values()):
        return {}
    now = database.now(connection)
    today = now.astimezone(UTC).date()
    query = sa.select(usage.c.owner, usage.c.device_seconds).where(usage.c.day == today)
    used: defaultdict[str, float] = defaultdict(
        float, {row.owner: row.device_seconds for row in connection.execute(query)}
    )
    running: Counter[str] = Counter()
    for job in connection.execute(
        sa.select(jobs.c.owned_by, jobs.c.claimed_at, jobs.c.devices_needed).where(is_held(database))
    ):
        running[job.owned_by] += 1
        used[job.owned_by] += _device_seconds(now, job.claimed_at, job.devices_needed)
    active = jobs.c.state.in_((JobState.QUEUED.value, JobState.RUNNING.value))
    reasons = {}
    for owner in connection.scalars(sa.select(jobs.c.owned_by).where(active).distinct()):
        quota = quota_of(found, owner)
        if quota.max_device_seconds is not None and used[owner] >= quota.max_device_seconds:
            limit = f"{quota.max_device_seconds} device seconds a day, all used on {today} (UTC)"
            reasons[owner] = ClaimQuota(f"{HELD_BACK}'{owner}': {limit}", holds=True)
        elif quota.max_running is not None:
            limit = f"{quota.max_running} running at a time"
            reasons[owner] = ClaimQuota(f"{HELD_BACK}'{owner}': {limit}", running[owner] >= quota.max_running)
    return reasons


def _device_seconds(now: datetime, claimed_at: datetime | None, num_devices: int) -> float:
    """Return the device seconds since a claim; 0 for a claim of an earlier version, which did not store its time."""
    return 0.0 if claimed_at is None else max(0.0, (now - claimed_at).total_seconds()) * num_devices


def _today(database: Database) -> sa.ColumnElement[date]:
    if database.is_postgresql:
        return sa.cast(sa.func.timezone("UTC", sa.func.clock_timestamp()), sa.Date)
    return sa.literal(datetime.now(UTC).date(), sa.Date)
