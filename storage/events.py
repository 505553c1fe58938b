"""The event log of a job, appended under the job's row and read by cursor; and what was recommended when.

An answer is stored with its job alone, and not with the event that announces it. An event with a recommendation holds
the part about the candidate. The comparison with others, and the notes, stand in the job's recommendation and answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from bexp.explorer.records.event import Event, EventCode, EventDraft
from bexp.explorer.records.recommendation import Recommendation
from bexp.storage.database import Database
from bexp.storage.notifications import notify_events
from bexp.storage.tables import events, jobs, recommendations

_COMPARED = ("alternatives", "dividing_batch_sizes", "notes")
_OF_PLAN = ("plain", "parts", "picture")
_LEFT_OUT: dict[str, Any] = {**dict.fromkeys(_COMPARED, True), "plan": set(_OF_PLAN)}
"""Fields of a recommendation, and of its plan, that are left out of events."""


def insert_if_changed(connection: sa.Connection, job_id: str, seq: int, best: Recommendation | None) -> None:
    """Insert a row: `best` is recommended since the event `seq`. Nothing is inserted if the job's last row says so.

    The caller holds the lock of the job's row.
    """
    if best is None:
        return
    of_job = recommendations.c.job_id == job_id
    last = connection.execute(
        sa.select(recommendations).where(of_job).order_by(recommendations.c.seq.desc()).limit(1)
    ).one_or_none()
    values = {**best.figures._asdict(), "candidate": best.candidate.model_dump(mode="json", exclude_none=True)}
    if last is not None and all(getattr(last, name) == value for name, value in values.items()):
        return
    at = sa.select(events.c.at).where(events.c.job_id == job_id, events.c.seq == seq).scalar_subquery()
    connection.execute(sa.insert(recommendations).values(job_id=job_id, seq=seq, at=at, **values))


def shorten(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a recommendation that an event stores: the fields that differ from their defaults."""
    best = Recommendation.model_validate(document)
    return best.model_dump(mode="json", exclude=_LEFT_OUT, exclude_defaults=True)


def restore(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document that `shorten` was given, without what is left out."""
    return Recommendation.model_validate(stored).model_dump(mode="json")


PAGE = 500
_INSERT = sa.insert(events)
_ENDS = [int(code) for code in EventCode if code.ends_job]


def read_events(database: Database, job_id: str, *, after: int = 0, limit: int = PAGE) -> list[Event]:
    """Return events with `seq` > `after`, in order, at most `limit`; none for a job that does not exist."""
    of_end = (jobs.c.id == events.c.job_id) & events.c.code.in_(_ENDS)
    query = (
        sa.select(events, jobs.c.answer)
        .select_from(events.outerjoin(jobs, of_end))
        .where(events.c.job_id == job_id, events.c.seq > after)
        .order_by(events.c.seq)
        .limit(limit)
    )
    with database.read() as connection:
        rows = connection.execute(query).all()
    return [
        Event(seq=row.seq, at=row.at, code=EventCode(row.code), message=row.message, data=_read_data(row))
        for row in rows
    ]


def read_last_seqs(database: Database, job_ids: Collection[str] | None = None) -> dict[str, int]:
    """Return the seq of the last event of each of these jobs, or of all; a job that does not exist is left out."""
    query = sa.select(jobs.c.id, jobs.c.last_seq)
    with database.read() as connection:
        rows = connection.execute(query if job_ids is None else query.where(jobs.c.id.in_(job_ids)))
        return {row.id: row.last_seq for row in rows}


def count_events(connection: sa.Connection, job_id: str, after: int, *, without: EventCode) -> int:
    """Return the number of a job's events with `seq` > `after` and no code `without`, within a transaction."""
    here = [events.c.job_id == job_id, events.c.seq > after, events.c.code != int(without)]
    return connection.scalars(sa.select(sa.func.count()).where(*here)).one()


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
    """Insert `drafts` so that the last of them has `last_seq`; the commit notifies the listeners.

    `at` is the database's time, for a caller that has read it already. Nobody listens to a job that `is_new`.

    The caller has taken those numbers by adding len(drafts) to the job's `last_seq` in this transaction. The row lock
    of that update keeps the numbers of concurrent writers apart, and a rollback leaves no gap. If a draft holds the
    job's answer, the caller stores the answer with the job.
    """
    if not drafts:
        return
    now = at or database.now(connection)
    rows = []
    for seq, draft in enumerate(drafts, last_seq - len(drafts) + 1):
        data = draft.data
        if draft.code is EventCode.RECOMMENDATION:
            data = {**data, "recommendation": shorten(data["recommendation"])}
        elif draft.code.ends_job and "answer" in data:
            data = {**data, "answer": {"timings": data["answer"]["timings"]}}
        content = {"code": int(draft.code), "message": draft.message, "data": data}
        rows.append({"job_id": job_id, "seq": seq, "at": now, **content})
    connection.execute(_INSERT, rows)
    if not is_new:
        notify_events(database, connection, {job_id: last_seq})


def insert_same_event(
    database: Database, connection: sa.Connection, last_seqs: Mapping[str, int], draft: EventDraft
) -> None:
    """Insert `draft` for several jobs; `last_seqs` has the seq that it gets in each log.

    The draft holds neither a recommendation nor an answer. The numbers are taken as for `insert_events`.
    """
    if not last_seqs:
        return
    same = {"at": database.now(connection), "code": int(draft.code), "message": draft.message, "data": draft.data}
    connection.execute(sa.insert(events), [{"job_id": job_id, "seq": seq, **same} for job_id, seq in last_seqs.items()])
    notify_events(database, connection, last_seqs)


def keep_answer(connection: sa.Connection, job_id: str, seq: int, answer: Mapping[str, Any]) -> None:
    """Store the answer of a job with the event that announced it, because the job is to get another one."""
    here = (events.c.job_id == job_id) & (events.c.seq == seq)
    data = connection.scalar(sa.select(events.c.data).where(here))
    if data is not None and "answer" in data:
        whole = {**data, "answer": {**answer, **data["answer"]}}
        connection.execute(sa.update(events).where(here).values(data=whole))


def _read_data(row: sa.Row[Any]) -> dict[str, Any]:
    data: dict[str, Any] = row.data
    if row.code == EventCode.RECOMMENDATION:
        return {**data, "recommendation": restore(data["recommendation"])}
    if "answer" in data and row.answer is not None:
        return {**data, "answer": {**row.answer, **data["answer"]}}
    return data
