"""Puts a job that was cancelled or has failed back into the queue, with all that is stored of it."""

from __future__ import annotations

from bexp.explorer.records.event import EventCode, EventDraft
from bexp.storage.audit import Action, note_action
from bexp.storage.changes import change_job
from bexp.storage.database import Database
from bexp.storage.events import keep_answer
from bexp.storage.jobs import Job, JobState, job_from_row, select_row
from bexp.storage.notifications import QUEUED_JOBS, notify
from bexp.storage.own_workers import reserve_job
from bexp.storage.owners import LOCAL, Caller
from bexp.storage.quotas import check_queued, check_stored, find_quota
from bexp.storage.tables import jobs


class JobFinishedError(Exception):
    """The job has succeeded, so there is nothing left to do."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"exploration {job_id} has succeeded: there is nothing left to explore")
        self.job_id = job_id


def resume_job(database: Database, job_id: str, *, by: Caller = LOCAL, own_worker: str = "") -> Job:
    """Queue a job again that was cancelled or has failed; one that waits or runs stays as it is.

    Its attempts and failures count from zero again. Its log goes on after the event that ended it. The job is then for
    the worker called `own_worker` alone, or for all without a name; one that waits is so unless its own worker lives.

    Raises:
        JobNotFoundError: there is no such job that the caller sees.
        QueuedQuotaError: its owner has as many jobs in the queue as its quota allows.
        StoredQuotaError: its owner stores as much as its quota allows.
        JobFinishedError: the job has succeeded.
    """
    with database.begin() as connection:
        row = select_row(connection, job_id, lock=True, owner=by.sees)
        state = JobState(row.state)
        if state is JobState.SUCCEEDED:
            raise JobFinishedError(job_id)
        if state.is_final:
            quota = find_quota(connection, row.owner)
            check_stored(database, connection, row.owner, quota)
            check_queued(database, connection, row.owner, quota)
            if row.answer is not None:
                keep_answer(connection, job_id, row.last_seq, row.answer)
            draft = EventDraft(code=EventCode.QUEUED, message=f"Exploration {job_id} is queued again")
            change_job(
                database,
                connection,
                [jobs.c.id == job_id],
                [draft],
                state=JobState.QUEUED.value,
                error=None,
                answer=None,
                cancel_requested=False,
                finished_at=None,
                queued_at=database.clock(),
                not_before=None,
                waiting_reason=None,
                own_worker="",
                num_releases=jobs.c.attempt,
                num_faults=0,
            )
            note_action(database, connection, by, Action.RESUME, job_id)
        reserve_job(database, connection, job_id, own_worker)
        notify(database, connection, QUEUED_JOBS)
        row = select_row(connection, job_id)
    return job_from_row(row)
