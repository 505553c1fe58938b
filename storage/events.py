"""The event log of a job: appended under the job's row, read by cursor."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import sqlalchemy as sa

from explorer.records.event import Event, EventCode, EventDraft
from storage.database import Database
from storage.notifications import notify_events
from storage.tables import events, jobs


def read_events(database: Database, job_id: str, *, after: int = 0, limit: int = 500) -> list[Event]:
    """Return events with `seq` > `after`, in order, at most `limit`; none for a job that does not exist."""
    query = sa.select(events).where(events.c.job_id == job_id, events.c.seq > after).order_by(events.c.seq).limit(limit)
    with database.read() as connection:
        rows = connection.execute(query).all()
    return [Event(seq=row.seq, at=row.at, code=EventCode(row.code), message=row.message, data=row.data) for row in rows]


def read_last_seqs(database: Database, job_ids: Collection[str]) -> dict[str, int]:
    """Return the seq of the last event of each of these jobs; a job that does not exist is left out."""
    with database.read() as connection:
        rows = connection.execute(sa.select(jobs.c.id, jobs.c.last_seq).where(jobs.c.id.in_(job_ids)))
        return {row.id: row.last_seq for row in rows}


def insert_events(
    database: Database, connection: sa.Connection, job_id: str, last_seq: int, drafts: Sequence[EventDraft]
) -> None:
    """Insert `drafts` so that the last of them has `last_seq`, and tell those who listen when they are committed.

    The caller has taken those numbers by adding len(drafts) to the job's `last_seq` in this transaction. The row lock
    of that update keeps the numbers of concurrent writers apart, and a rollback leaves no gap.
    """
    if not drafts:
        return
    now = database.now(connection)
    first = last_seq - len(drafts) + 1
    connection.execute(
        sa.insert(events),
        [
            {
                "job_id": job_id,
                "seq": first + i,
                "at": now,
                "code": int(draft.code),
                "message": draft.message,
                "data": draft.data,
            }
            for i, draft in enumerate(drafts)
        ],
    )
    notify_events(database, connection, job_id, last_seq)
