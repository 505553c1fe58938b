"""A worker's progress: what it writes to the job's row, the event of its claim, and its place in the log."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from bexp.explorer.records.event import EventCode, EventDraft, Progress
from bexp.explorer.records.recommendation import Recommendation
from bexp.storage.changes import fence
from bexp.storage.events import count_events
from bexp.storage.leases import Lease, LeaseLostError
from bexp.storage.tables import jobs


def progress_values(progress: Progress) -> dict[str, Any]:
    """Return what progress changes in the job's row."""
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
    """Return the columns of a job that a list shows of its recommendation."""
    names = ("micro_batch_size", "performance", "tokens_per_second", "confidence")
    return {name: best and getattr(best.figures, name) for name in names}


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
    """Return the last seq of a log that has gone on since `after_seq`, and whether it has it already.

    While the lease had run out, for instance in a frozen worker, others may have noted why the job waits.

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
