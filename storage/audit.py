"""The record of who did what, from where, and when. Each row is written in the transaction of the change itself."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

import sqlalchemy as sa

from bexp.storage.database import Database
from bexp.storage.owners import Caller
from bexp.storage.tables import audit

KEEP_AUDIT = timedelta(days=365)
"""Older records are deleted."""

MOST_RECORDS = 1_000_000
"""The most records that are kept of one owner's actions: about 150 MB on SQLite."""
_INSERT = sa.insert(audit)


class Action(StrEnum):
    """An action on a job, a token, or the quota of an owner."""

    SUBMIT = "submit"
    CANCEL = "cancel"
    RESUME = "resume"
    DELETE = "delete"
    WRITE_NOTES = "write notes"
    CREATE_TOKEN = "create token"  # noqa: S105 - no password
    REVOKE_TOKEN = "revoke token"  # noqa: S105 - no password
    SET_QUOTA = "set quota"


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One action. `owner`, `token` and `origin` are those of the caller; `id` grows from row to row."""

    id: int
    at: datetime
    action: Action
    subject: str
    owner: str
    token: str | None
    origin: str | None


def note_action(
    database: Database,
    connection: sa.Connection,
    by: Caller,
    action: Action,
    *subjects: str,
    at: datetime | None = None,
) -> None:
    """Record that `by` did `action` to each of `subjects`: ids of jobs, or names of tokens or owners.

    `at` is the database's time, for a caller that has read it already.
    """
    if not subjects:
        return
    who = {"action": action.value, "owner": by.owner, "token": by.token, "origin": by.origin}
    insert = _INSERT if at is not None else _INSERT.values(at=database.clock())
    values = who if at is None else {**who, "at": at}
    connection.execute(insert, [values | {"subject": subject} for subject in subjects])


def read_audit(
    database: Database, *, owner: str | None = None, before: int | None = None, limit: int = 100
) -> list[AuditRecord]:
    """Return the latest `limit` records, the newest first.

    Args:
        database: where they are.
        owner: only those of this caller.
        before: only those before the record with this id.
        limit: how many at most.
    """
    query = sa.select(audit).order_by(audit.c.id.desc()).limit(limit)
    if owner is not None:
        query = query.where(audit.c.owner == owner)
    if before is not None:
        query = query.where(audit.c.id < before)
    with database.read() as connection:
        rows = connection.execute(query).all()
    return [
        AuditRecord(row.id, row.at, Action(row.action), row.subject, row.owner, row.token, row.origin) for row in rows
    ]


def prune_audit(database: Database, older_than: timedelta = KEEP_AUDIT, *, at_most: int | None = None) -> int:
    """Delete the records that are older, the oldest `at_most` of them; return how many were deleted."""
    old = sa.select(audit.c.id).where(audit.c.at < database.clock(-older_than)).order_by(audit.c.at).limit(at_most)
    return _delete(database, old)


def prune_most_recorded(database: Database, keep: int = MOST_RECORDS, *, at_most: int | None = None) -> int:
    """Delete all but the latest `keep` records of the owner with the most, `at_most` of them; return how many."""
    beyond = (sa.func.count() - keep).label("beyond")
    most = sa.select(audit.c.owner, beyond).group_by(audit.c.owner).order_by(beyond.desc()).limit(1)
    with database.read() as connection:
        row = connection.execute(most).one_or_none()
    if row is None or row.beyond <= 0:
        return 0
    excess = row.beyond if at_most is None else min(at_most, row.beyond)
    return _delete(database, sa.select(audit.c.id).where(audit.c.owner == row.owner).order_by(audit.c.id).limit(excess))


def _delete(database: Database, records: sa.Select[tuple[int]]) -> int:
    with database.begin() as connection:
        return connection.execute(sa.delete(audit).where(audit.c.id.in_(records))).rowcount
