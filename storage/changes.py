"""Changes a job's row: its version, its events, its progress, and the check of a lease, in one statement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from bexp.explorer.records.event import EventCode, EventDraft, Progress
from bexp.explorer.records.recommendation import Recommendation
from bexp.storage.database import Database
from bexp.storage.events import count_events, insert_events, insert_same_event
from bexp.storage.jobs import JobState
from bexp.storage.leases import Lease, LeaseLostError, is_held
from bexp.storage.tables import jobs

Conditions = Sequence[sa.ColumnElement[bool]]

_END_EVENTS = {
    JobState.SUCCEEDED: EventCode.SUCCEEDED,
    JobState.FAILED: EventCode.FAILED,
    JobState.CANCELLED: EventCode.CANCELLED,
}


def change_job(
    database: Database,
    connection: sa.Connection,
    conditions: Conditions,
    drafts: Sequence[EventDraft] = (),
    **values: Any,
) -> int | None:
    """Change the one job that meets `conditions`, and append `drafts` to its log.

    Returns the seq of the log's last event; None if no job meets the conditions.
    """
    change = (
        sa.update(jobs)
        .where(*conditions)
        .values(version=jobs.c.version + 1, last_seq=jobs.c.last_seq + len(drafts), **values)
        .returning(jobs.c.id, jobs.c.last_seq)
    )
    row = connection.execute(change).one_or_none()
    if row is None:
        return None
    insert_events(database, connection, row.id, row.last_seq, drafts)
    last_seq: int = row.last_seq
    return last_seq


def change_jobs(
    database: Database, connection: sa.Connection, conditions: Conditions, draft: EventDraft, **values: Any
) -> None:
    """Change each job that meets `conditions`, and append `draft`, which is no recommendation, to its log.

    No lease ends here. It takes three statements, however many jobs there are.
    """
    change = (
        sa.update(jobs)
        .where(*conditions)
        .values(version=jobs.c.version + 1, last_seq=jobs.c.last_seq + 1, **values)
        .returning(jobs.c.id, jobs.c.last_seq)
    )
    changed = {row.id: row.last_seq for row in connection.execute(change)}
    insert_same_event(database, connection, changed, draft)


def write_job(
    database: Database, connection: sa.Connection, lease: Lease, drafts: Sequence[EventDraft] = (), **values: Any
) -> int:
    """Change a job under a lease as `change_job` does; return the seq of its last event.

    Raises:
        LeaseLostError: the lease is gone, and nothing was written.
    """
    last_seq = change_job(database, connection, fence(lease), drafts, **values)
    if last_seq is None:
        raise LeaseLostError(lease)
    return last_seq


def end_job(
    database: Database,
    connection: sa.Connection,
    conditions: Conditions,
    state: JobState,
    error: str | None = None,
) -> None:
    """End the job that meets `conditions`, if one does."""
    change_job(database, connection, conditions, [job_end_event(state, error)], **end_values(database, state, error))


def job_end_event(state: JobState, error: str | None) -> EventDraft:
    """Return the event that closes the log."""
    return EventDraft(code=_END_EVENTS[state], message=f"Exploration {state}" + (f": {error}" if error else ""))


def end_values(database: Database, state: JobState, error: str | None) -> dict[str, Any]:
    """Return the columns of a job that ends."""
    return {
        "state": state.value,
        "error": error,
        "worker": None,
        "lease_expires_at": None,
        "waiting_reason": None,
        "finished_at": database.clock(),
        "stored_bytes": None,
    }


def fence(lease: Lease) -> Conditions:
    """Return the conditions that the job of `lease` meets as long as the lease is held."""
    return [
        jobs.c.id == lease.job_id,
        jobs.c.worker == lease.worker,
        jobs.c.attempt == lease.attempt,
        jobs.c.state == JobState.RUNNING.value,
    ]


def has_no_worker(database: Database) -> sa.ColumnElement[bool]:
    """Return the condition of jobs that wait for a worker: they are queued, or their worker's lease has run out."""
    abandoned = (jobs.c.state == JobState.RUNNING.value) & sa.not_(is_held(database))
    return sa.or_(jobs.c.state == JobState.QUEUED.value, abandoned)


def progress_values(progress: Progress) -> dict[str, Any]:
    """Return the columns of a job that progress changes, with their values."""
    values: dict[str, Any] = {} if progress.space is None else {"space": progress.space}
    best = progress.recommendation
    if progress.answer is not None:
        best = progress.answer.recommendation
        values |= {"answer": progress.answer.model_dump(mode="json"), "serves_up_to": progress.answer.serves_up_to}
        values |= {"recommendation": None, **summary_of(best)}  # the answer has it
    elif best is not None and progress.is_main:
        values["recommendation"] = best.model_dump(mode="json")
        values |= summary_of(best)
    return values


def summary_of(best: Recommendation | None) -> dict[str, Any]:
    """Return the columns of a job that describe its recommendation in a list."""
    names = ("micro_batch_size", "performance", "tokens_per_second", "confidence")
    figures = {name: best and getattr(best.figures, name) for name in names}
    return {**figures, "rate_unit": best and best.rate_unit.value}


def claim_event(attempt: int, worker: str, description: str | None, target: str, num_trials: int) -> EventDraft:
    """Return the event that says who has taken a job, and how much of it is stored already."""
    where = f"worker {worker}" + (f" ({description})" if description else "")
    data: dict[str, Any] = {"worker": worker, "attempt": attempt, "target": target}
    if attempt == 1:
        return EventDraft(
            code=EventCode.STARTED, message=f"Exploration started by {where}, measuring {target}", data=data
        )
    stored = f"{num_trials} stored trial{'' if num_trials == 1 else 's'}"
    data["num_trials"] = num_trials
    return EventDraft(code=EventCode.RESUMED, message=f"Exploration resumed by {where} with {stored}", data=data)


def find_progress(
    connection: sa.Connection, lease: Lease, progress: Progress, after_seq: int | None
) -> tuple[int, bool]:
    """Return the last seq of a log that has gone on since `after_seq`, and whether the log holds `progress` already.

    Reasons for waiting do not count: others note them while the lease of a frozen worker has run out.

    Raises:
        LeaseLostError: the lease is gone, or the log has gone on in another way, or it ends before `after_seq`, because
            the database was restored from a backup.
    """
    held = sa.select(jobs.c.last_seq).where(*fence(lease)).with_for_update()
    last_seq = connection.scalar(held)
    if last_seq is None or after_seq is None or last_seq < after_seq:
        raise LeaseLostError(lease)
    num_since = count_events(connection, lease.job_id, after_seq, without=EventCode.WAITING)
    if num_since not in {0, len(progress.events)}:
        raise LeaseLostError(lease)
    return last_seq, num_since > 0
