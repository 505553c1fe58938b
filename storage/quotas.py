"""Quotas of owners: how many jobs may wait, how many may run, and how much all of them may take in the database."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from bexp.storage.audit import Action, note_action
from bexp.storage.database import Database
from bexp.storage.owners import LOCAL, Caller, check_name
from bexp.storage.stored_bytes import StoredSums, sum_stored_bytes
from bexp.storage.tables import IS_QUEUED, jobs, quotas

EVERYBODY = "*"
"""The name under which the quota of each owner is stored that has none of its own."""

_SUBMISSIONS = int.from_bytes(b"bexq", "big")
"""The first number of PostgreSQL's advisory locks for submissions; the second one is the owner's."""

MAX_STORED_BYTES = 1_000_000_000
"""What the jobs of an owner may take that has no quota for it."""

_OF_OWNER = sa.select(quotas).where(sa.or_(quotas.c.owner == sa.bindparam("name"), quotas.c.owner == EVERYBODY))


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of one owner; None is no limit.

    A submission above `max_queued` is refused. `max_running` holds back claims; a job that runs is never stopped.
    Without `max_stored_bytes`, MAX_STORED_BYTES holds.
    """

    max_queued: int | None = None
    max_running: int | None = None
    max_stored_bytes: int | None = None

    @property
    def stored_limit(self) -> int:
        """What the jobs may take, in bytes."""
        return MAX_STORED_BYTES if self.max_stored_bytes is None else self.max_stored_bytes


class QueuedQuotaError(Exception):
    """The owner has as many jobs in the queue as its quota allows."""

    def __init__(self, owner: str, limit: int) -> None:
        super().__init__(f"owner '{owner}' may have {limit} explorations in the queue, and has as many")
        self.owner = owner
        self.limit = limit


class StoredQuotaError(Exception):
    """The jobs of the owner take as many bytes as its quota allows."""

    def __init__(self, owner: str, limit: int, stored: int) -> None:
        super().__init__(f"explorations of owner '{owner}' take {stored:,} bytes, and may take {limit:,}")
        self.owner = owner
        self.limit = limit
        self.stored = stored


def set_quota(database: Database, owner: str, quota: Quota | None, *, by: Caller = LOCAL) -> None:
    """Store the quota of an owner, or of EVERYBODY; None removes it.

    Raises:
        ValueError: `owner` is not a name of an owner.
    """
    if owner != EVERYBODY:
        check_name("an owner's name", owner)
    change: sa.Executable = sa.delete(quotas).where(quotas.c.owner == owner)
    if quota is not None:
        insert = postgresql.insert(quotas) if database.is_postgresql else sqlite.insert(quotas)
        values = asdict(quota)  # another administrator may store one at this moment
        change = insert.values(owner=owner, **values).on_conflict_do_update(index_elements=["owner"], set_=values)
    with database.begin() as connection:
        connection.execute(change)
        note_action(database, connection, by, Action.SET_QUOTA, owner)


def list_quotas(database: Database) -> dict[str, Quota]:
    """Return the quotas by owner, in the order of the names."""
    with database.read() as connection:
        return select_quotas(connection)


def select_quotas(connection: sa.Connection) -> dict[str, Quota]:
    """`list_quotas` within a transaction."""
    return _by_owner(connection.execute(sa.select(quotas).order_by(quotas.c.owner)))


def _by_owner(rows: Iterable[sa.Row[Any]]) -> dict[str, Quota]:
    return {row.owner: Quota(row.max_queued, row.max_running, row.max_stored_bytes) for row in rows}


def quota_of(by_owner: Mapping[str, Quota], owner: str) -> Quota:
    """Return the quota that holds for an owner."""
    return by_owner.get(owner) or by_owner.get(EVERYBODY) or Quota()


def find_quota(connection: sa.Connection, owner: str) -> Quota:
    """`quota_of` within a transaction."""
    return quota_of(_by_owner(connection.execute(_OF_OWNER, {"name": owner})), owner)


def check_queued(database: Database, connection: sa.Connection, owner: str, quota: Quota) -> None:
    """Check that an owner may have one more job in the queue, within a transaction that may write.

    Others that check it for the same owner wait until that ends, so that two at once do not both take the last place.

    Raises:
        QueuedQuotaError: it may not.
    """
    limit = quota.max_queued
    if limit is None:
        return
    if database.is_postgresql:  # on SQLite the transaction holds the write lock already
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_SUBMISSIONS, sa.func.hashtext(owner))))
    queued = sa.select(sa.func.count()).select_from(jobs).where(IS_QUEUED, jobs.c.owner == owner)
    if connection.scalars(queued).one() >= limit:
        raise QueuedQuotaError(owner, limit)


def check_stored(
    database: Database,
    connection: sa.Connection,
    owner: str,
    quota: Quota,
    sums: StoredSums | None = None,
    num_bytes: int = 0,
) -> None:
    """Check that an owner may store more, within a transaction that may write.

    Submissions at the same moment may all be accepted. They exceed the quota by what they take themselves. With `sums`,
    one of `num_bytes` bytes is accepted without another sum while the quota is far.

    Raises:
        StoredQuotaError: it may not.
    """
    limit = quota.stored_limit
    if sums is not None and sums.has_room(owner, limit, num_bytes):
        return
    stored, any_void = sum_stored_bytes(database, connection, owner, limit)
    if stored >= limit:
        raise StoredQuotaError(owner, limit, stored)
    if sums is not None and not any_void:  # there may be more than were counted
        sums.note(owner, stored, num_bytes)
