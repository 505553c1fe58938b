"""Which job is next: owners take turns, and within an owner the job of the highest priority is first.

The owner whose jobs hold the fewest devices is next; among equals, the one whose last claim was longest ago. An owner
with a thousand queued jobs thus delays another by one claim at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from bexp.storage.database import Database
from bexp.storage.jobs import JobState
from bexp.storage.leases import is_held
from bexp.storage.quotas import find_quota, quota_of, select_quotas
from bexp.storage.tables import jobs, turns

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

    Returns None if there is none. `connection` only reads, so that an idle worker takes no lock.
    """
    held_back = [owner for owner, quota in find_claim_quotas(database, connection).items() if quota.holds]
    if held_back:
        conditions = (*conditions, jobs.c.owner.not_in(held_back))
    if connection.execute(sa.select(jobs.c.id).where(*conditions).limit(1)).first() is None:
        return None
    held = (
        sa.select(jobs.c.owner, sa.func.sum(jobs.c.devices_needed).label("num_devices"))
        .where(is_held(database))
        .group_by(jobs.c.owner)
        .subquery("held")
    )
    return (
        sa.select(jobs.c.id)
        .select_from(jobs.outerjoin(held, held.c.owner == jobs.c.owner).outerjoin(turns, turns.c.owner == jobs.c.owner))
        .where(*conditions)
        .order_by(
            sa.func.coalesce(held.c.num_devices, 0),
            turns.c.claimed_at.nulls_first(),
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
    insert = postgresql.insert(turns) if database.is_postgresql else sqlite.insert(turns)
    now = {"claimed_at": database.clock()}
    take = insert.values(owner=owner, **now).on_conflict_do_update(index_elements=[turns.c.owner], set_=now)
    connection.execute(take)
    limit = find_quota(connection, owner).max_running
    if limit is None:
        return True
    mine = sa.select(sa.func.count()).where(is_held(database), jobs.c.owner == owner)
    return connection.scalars(mine).one() <= limit


def find_claim_quotas(database: Database, connection: sa.Connection) -> dict[str, ClaimQuota]:
    """Return what the quotas mean for claims, for each owner that has jobs and such a quota."""
    quotas = select_quotas(connection)
    if all(quota.max_running is None for quota in quotas.values()):
        return {}
    held = sa.select(jobs.c.owner, sa.func.count()).where(is_held(database)).group_by(jobs.c.owner)
    running = {row[0]: row[1] for row in connection.execute(held)}
    active = jobs.c.state.in_((JobState.QUEUED.value, JobState.RUNNING.value))
    reasons = {}
    for owner in connection.scalars(sa.select(jobs.c.owner).where(active).distinct()):
        limit = quota_of(quotas, owner).max_running
        if limit is not None:
            reason = f"{HELD_BACK}'{owner}': {limit} running at a time"
            reasons[owner] = ClaimQuota(reason, running.get(owner, 0) >= limit)
    return reasons
