"""Quotas of owners: the jobs that may wait, those that may run, and the room that all take in the database.

Each job's row has the count of its bytes. It is that of a queued job until the job ends or a real run is reported. Then
it is void, and the owner's next submission counts the job anew.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql.dml import ReturningUpdate

from bexp.storage.audit import Action, note_action
from bexp.storage.database import Database, dump_json
from bexp.storage.owners import LOCAL, Caller, check_name
from bexp.storage.tables import IS_QUEUED, events, jobs, labels, quotas, recommendations, run_reports, trials

JOB_BYTES = 750
"""The bytes of a job in addition to its texts: its plain columns, and an entry in each index."""
ROW_BYTES = 80
"""The same of any other row."""

MOST_COUNTED = 100
"""The most jobs that one submission counts, so that it does not take long."""

SUM_SECONDS = 10.0
"""The age up to which a sum holds for the next submissions; workers and other processes write as well."""
SHARE_OF_ROOM = 1 / 64
"""The share of the free room that a process accepts before it sums again. Each of the other processes may have as much
left to accept when the quota is reached.
"""

_TEXTS = {
    jobs: ("request", "report", "space", "recommendation", "answer", "error", "waiting_reason", "notes"),
    events: ("message", "data"),
    recommendations: ("candidate",),
    trials: ("trial",),
    run_reports: ("report",),
    labels: ("key", "value"),
}
"""The columns of each table whose values may be long."""


@dataclass(slots=True)
class _Sum:
    stored: int
    accepted: int
    at: float


class StoredSums:
    """The last sum of the bytes of each owner's jobs, and the bytes that were accepted since without a sum.

    A sum reads an entry of each job of the owner, which takes longer than all the rest of a submission.
    """

    def __init__(self) -> None:
        self._by_owner: dict[str, _Sum] = {}

    def has_room(self, owner: str, limit: int, num_bytes: int) -> bool:
        """Return whether so many bytes may be stored without another sum; if so, they count as accepted."""
        last = self._by_owner.pop(owner, None)  # what comes after a refusal needs a sum as well
        if last is None or time.monotonic() > last.at + SUM_SECONDS:
            return False
        if last.accepted + num_bytes > (limit - last.stored) * SHARE_OF_ROOM:
            return False
        last.accepted += num_bytes
        self._by_owner[owner] = last
        return True

    def note(self, owner: str, stored: int, num_bytes: int) -> None:
        """Note a sum, and the bytes that are accepted after it."""
        self._by_owner[owner] = _Sum(stored, num_bytes, time.monotonic())


def sum_stored_bytes(database: Database, connection: sa.Connection, owner: str, enough: int) -> tuple[int, bool]:
    """Return the bytes that the jobs of an owner take, and whether the count of some job was void.

    At most MOST_COUNTED jobs whose count is void are counted first, unless the others take `enough` already. The
    transaction may write.
    """
    is_void = sa.func.count() > sa.func.count(jobs.c.stored_bytes)
    counted = sa.select(sa.func.sum(jobs.c.stored_bytes), is_void).where(jobs.c.owner == owner)
    total, any_void = connection.execute(counted).one()
    stored = int(total or 0)
    if stored < enough and any_void:
        given = {"of_owner": owner, "most": MOST_COUNTED}
        stored += sum(map(int, connection.scalars(_count_void(database.is_postgresql), given)))
    return stored, any_void


def count_queued(request: Mapping[str, Any], texts: Iterable[str], labels: Mapping[str, str]) -> int:
    """Return the bytes of a queued job whose events have these texts and no data."""
    rows = [*(dump_json({}) + text for text in texts), *(key + value for key, value in labels.items())]
    return JOB_BYTES + len(dump_json(request).encode()) + sum(ROW_BYTES + len(row.encode()) for row in rows)


@cache  # it takes longer to make than to execute, and a submission has the write lock meanwhile
def _count_void(is_postgresql: bool) -> ReturningUpdate[int]:
    """Return the statement that counts `most` jobs of `of_owner` whose count is void, and returns their counts."""
    void = (
        sa.select(jobs.c.id)
        .where(jobs.c.owner == sa.bindparam("of_owner"), jobs.c.stored_bytes.is_(None))
        .limit(sa.bindparam("most"))
        .with_for_update(skip_locked=True)  # the worker that writes one now voids the count again
    )
    total = JOB_BYTES + _num_bytes(jobs, is_postgresql)
    for table in _TEXTS.keys() - {jobs}:
        rows = sa.select(sa.func.sum(ROW_BYTES + _num_bytes(table, is_postgresql))).where(table.c.job_id == jobs.c.id)
        total += sa.func.coalesce(rows.scalar_subquery(), 0)
    return sa.update(jobs).where(jobs.c.id.in_(void)).values(stored_bytes=total).returning(jobs.c.stored_bytes)


def _num_bytes(table: sa.Table, is_postgresql: bool) -> sa.ColumnElement[int]:
    total: sa.ColumnElement[int] = sa.literal(0)
    for name in _TEXTS[table]:
        text = sa.cast(table.c[name], sa.Text)
        length = sa.func.octet_length(text) if is_postgresql else sa.func.length(sa.cast(text, sa.LargeBinary))
        total += sa.func.coalesce(length, 0)
    return total


EVERYBODY = "*"
"""The name of the quota of each owner that has none of its own."""

_SUBMISSIONS = int.from_bytes(b"bexq", "big")
"""The first number of PostgreSQL's advisory locks for submissions; the second one is the owner's."""

MAX_STORED_BYTES = 1_000_000_000
"""The bytes that an owner's jobs may take without a quota."""

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
        """The bytes that the jobs may take."""
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
    if quota is not None:  # another administrator may store one at this moment
        change = database.upsert(quotas, {"owner": owner}, asdict(quota))
    with database.begin() as connection:
        connection.execute(change)
        note_action(database, connection, by, Action.SET_QUOTA, owner)


def list_quotas(database: Database) -> dict[str, Quota]:
    """Return the quotas by owner, in the order of the names."""
    with database.read() as connection:
        return select_quotas(connection)


def select_quotas(connection: sa.Connection) -> dict[str, Quota]:
    """Return the quotas by owner, within a transaction."""
    return _by_owner(connection.execute(sa.select(quotas).order_by(quotas.c.owner)))


def _by_owner(rows: Iterable[sa.Row[Any]]) -> dict[str, Quota]:
    return {row.owner: Quota(row.max_queued, row.max_running, row.max_stored_bytes) for row in rows}


def quota_of(by_owner: Mapping[str, Quota], owner: str) -> Quota:
    """Return the quota that holds for an owner."""
    return by_owner.get(owner) or by_owner.get(EVERYBODY) or Quota()


def find_quota(connection: sa.Connection, owner: str) -> Quota:
    """Return the quota that holds for an owner, within a transaction."""
    return quota_of(_by_owner(connection.execute(_OF_OWNER, {"name": owner})), owner)


def check_queued(database: Database, connection: sa.Connection, owner: str, quota: Quota) -> None:
    """Check that an owner may have one more job in the queue, within a transaction that may write.

    Other checks for the same owner wait for the end of the transaction, so that two do not both take the last place.

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

    Submissions at the same moment may all be accepted, and exceed the quota by their own size. With `sums`, a
    submission of `num_bytes` is accepted without another sum while the quota is far.

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
