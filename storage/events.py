"""The event log of a job: appended under the job's row, read by cursor.

Recommendations resemble one another and take most of the room. Each is stored as what differs from the recommendation
before it in its block of BLOCK events, so that a reader has to begin at most a block earlier.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from bexp.explorer.records.event import Event, EventCode, EventDraft
from bexp.storage.compact import dump_json, pack, unpack
from bexp.storage.database import Database
from bexp.storage.notifications import notify_events
from bexp.storage.tables import events, jobs

BLOCK = 32
"""This is a part of the stored format: it never changes."""


def read_events(database: Database, job_id: str, *, after: int = 0, limit: int = 500) -> list[Event]:
    """Return events with `seq` > `after`, in order, at most `limit`; none for a job that does not exist."""
    query = sa.select(events).where(
        events.c.job_id == job_id,
        events.c.seq >= _start_of_block(after + 1),
        (events.c.seq > after) | (events.c.code == int(EventCode.RECOMMENDATION)),
    )
    with database.read() as connection:
        rows = connection.execute(query.order_by(events.c.seq).limit(limit + BLOCK)).all()
    return [event for event in _unpack_rows(rows) if event.seq > after][:limit]


def read_last_seqs(database: Database, job_ids: Collection[str]) -> dict[str, int]:
    """Return the seq of the last event of each of these jobs; a job that does not exist is left out."""
    with database.read() as connection:
        rows = connection.execute(sa.select(jobs.c.id, jobs.c.last_seq).where(jobs.c.id.in_(job_ids)))
        return {row.id: row.last_seq for row in rows}


def count_events(connection: sa.Connection, job_id: str, after: int, *, without: EventCode) -> int:
    """Return how many events with `seq` > `after`, those `without` a code, a job has, within a transaction."""
    here = [events.c.job_id == job_id, events.c.seq > after, events.c.code != int(without)]
    return connection.scalar(sa.select(sa.func.count()).where(*here)) or 0


def insert_events(
    database: Database,
    connection: sa.Connection,
    job_id: str,
    last_seq: int,
    drafts: Sequence[EventDraft],
    *,
    at: datetime | None = None,
    is_new: bool = False,
) -> None:
    """Insert `drafts` so that the last of them has `last_seq`, and tell those who listen when they are committed.

    `at` is the database's time if the caller has asked for it. Nobody listens to a job that `is_new`.

    The caller has taken those numbers by adding len(drafts) to the job's `last_seq` in this transaction. The row lock
    of that update keeps the numbers of concurrent writers apart, and a rollback leaves no gap.
    """
    if not drafts:
        return
    now = at or database.now(connection)
    first = last_seq - len(drafts) + 1
    chain = _Chain()
    if any(draft.code is EventCode.RECOMMENDATION for draft in drafts):
        chain = _read_chain(connection, job_id, first)
    rows = []
    for seq, draft in enumerate(drafts, first):
        message, data = chain.pack(seq, draft.code, draft.message, dump_json(draft.data))
        code = int(draft.code)
        rows.append({"job_id": job_id, "seq": seq, "at": now, "code": code, "message": message, "data": data})
    connection.execute(sa.insert(events), rows)
    if not is_new:
        notify_events(database, connection, {job_id: last_seq})


def insert_same_event(
    database: Database, connection: sa.Connection, last_seqs: Mapping[str, int], draft: EventDraft
) -> None:
    """Insert `draft`, which is no recommendation, for several jobs; `last_seqs` has the seq that it gets in each log.

    The numbers are taken as for `insert_events`.
    """
    assert draft.code is not EventCode.RECOMMENDATION, "it depends on those before it in its log"
    if not last_seqs:
        return
    same = {
        "at": database.now(connection),
        "code": int(draft.code),
        "message": pack(draft.message),
        "data": pack(dump_json(draft.data)),
    }
    connection.execute(sa.insert(events), [{"job_id": job_id, "seq": seq, **same} for job_id, seq in last_seqs.items()])
    notify_events(database, connection, last_seqs)


class _Chain:
    """The texts of the recommendation that the next one in the same block follows."""

    def __init__(self) -> None:
        self._block = 0
        self._message = self._data = ""

    def pack(self, seq: int, code: EventCode, message: str, data: str) -> tuple[bytes, bytes]:
        if code is not EventCode.RECOMMENDATION:
            return pack(message), pack(data)
        self._enter(seq)
        packed = pack(message, self._message), pack(data, self._data)
        self._message, self._data = unpack(packed[0], self._message), unpack(packed[1], self._data)
        return packed

    def unpack(self, seq: int, code: EventCode, message: bytes | str, data: bytes | str) -> tuple[str, str]:
        if code is not EventCode.RECOMMENDATION:
            return unpack(message), unpack(data)
        self._enter(seq)
        self._message, self._data = unpack(message, self._message), unpack(data, self._data)
        return self._message, self._data

    def _enter(self, seq: int) -> None:
        if self._block != _start_of_block(seq):
            self._block = _start_of_block(seq)
            self._message = self._data = ""


def _start_of_block(seq: int) -> int:
    return (seq - 1) // BLOCK * BLOCK + 1


def _read_chain(connection: sa.Connection, job_id: str, seq: int) -> _Chain:
    """Return the chain of the recommendations in the block of `seq` that come before it."""
    query = sa.select(events).where(
        events.c.job_id == job_id,
        events.c.code == int(EventCode.RECOMMENDATION),
        events.c.seq >= _start_of_block(seq),
        events.c.seq < seq,
    )
    chain = _Chain()
    for row in connection.execute(query.order_by(events.c.seq)):
        chain.unpack(row.seq, EventCode(row.code), row.message, row.data)
    return chain


def _unpack_rows(rows: Iterable[sa.Row[Any]]) -> Iterator[Event]:
    chain = _Chain()
    for row in rows:
        code = EventCode(row.code)
        message, data = chain.unpack(row.seq, code, row.message, row.data)
        yield Event(seq=row.seq, at=row.at, code=code, message=message, data=json.loads(data))
