"""Submission: puts new jobs into the queue, and puts back those that were cancelled or have failed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from types import SimpleNamespace
from typing import Any

import sqlalchemy as sa
from pydantic import ValidationError

from bexp.explorer.records.event import EventCode, EventDraft
from bexp.explorer.request.request import ExplorationRequest, request_key
from bexp.storage.audit import Action, note_action
from bexp.storage.changes import change_job
from bexp.storage.database import Database
from bexp.storage.events import insert_events, insert_if_changed, keep_answer
from bexp.storage.ids import new_job_id
from bexp.storage.jobs import Job, JobState, job_from_row, select_row
from bexp.storage.matching import needs_of, reserve_job
from bexp.storage.notifications import QUEUED_JOBS, notified, notify
from bexp.storage.owners import LOCAL, Caller
from bexp.storage.quotas import StoredSums, check_queued, check_stored, count_queued, find_quota
from bexp.storage.reuse import find_answer_of_live
from bexp.storage.tables import UTCDateTime, jobs, labels


def asks_the_same(stored: sa.Row[Any], request: ExplorationRequest, body_hash: str) -> bool:
    """Return whether the stored job's request is `request`, whose hash is `body_hash`.

    The hash covers all fields, so it differs between versions of this program that have other fields. Then both
    requests are compared as this version reads them, without the notices about their configuration.
    """
    if stored.body_hash == body_hash:
        return True
    try:
        first = ExplorationRequest.model_validate(stored.request)
    except ValidationError:
        return False
    return _without_notices(first) == _without_notices(request)


def _without_notices(request: ExplorationRequest) -> ExplorationRequest:
    return request.model_copy(update={"notices": ()})


KEY_LIFETIME = timedelta(hours=24)
"""The time in which an idempotency key stands for its first job."""


@cache  # SQLAlchemy compiles a statement once and keeps the result with it
def _insert(is_postgresql: bool, is_final: bool) -> sa.Executable:
    """Return the statement that inserts a job with the database's time, returns the time, and notifies workers.

    It is one statement, because each takes a round trip to the server. On SQLite the parameter `now` is the time.
    """
    now = sa.func.statement_timestamp() if is_postgresql else sa.bindparam("now", type_=UTCDateTime())
    times = {"created_at": now, "queued_at": now, **({"finished_at": now} if is_final else {})}
    notices = [notified(QUEUED_JOBS)] if is_postgresql and not is_final else []
    return sa.insert(jobs).values(times).returning(jobs.c.created_at, *notices)


@dataclass(frozen=True, slots=True)
class Submission:
    """The arguments of `Queue.enqueue`, which explains them."""

    request: ExplorationRequest
    by: Caller
    idempotency_key: str | None
    priority: int
    job_id: str | None
    own_worker: str


class IdempotencyConflictError(ValueError):
    """The idempotency key was used for another request."""

    def __init__(self, key: str, job_id: str) -> None:
        super().__init__(f"the idempotency key '{key}' was used for another request (exploration {job_id})")
        self.key = key
        self.job_id = job_id


def insert_submission(database: Database, given: Submission, sums: StoredSums) -> tuple[Job, bool]:
    """Store a job and its first events, as `Queue.enqueue` describes."""
    request, key, owner = given.request, given.idempotency_key, given.by.owner
    hashed = None if key is None else stored_key(owner, key)
    body_hash = hashlib.sha256(request.model_dump_json().encode()).hexdigest()
    job_id = given.job_id or new_job_id()
    drafts = [
        EventDraft(code=EventCode.QUEUED, message=f"Exploration {job_id} of {request.explored.name} is queued"),
        *(EventDraft(code=EventCode.WARNING, message=f"Configuration: {text}") for text in request.notices),
    ]
    document = request.model_dump(mode="json")
    values = {
        "id": job_id,
        "state": JobState.QUEUED.value,
        "owner": owner,
        "priority": given.priority,
        "request": document,
        "model_name": request.explored.name,
        **needs_of(request),
        "own_worker": given.own_worker,
        "confidence_target": request.budget.confidence_target,
        "attempt": 0,
        "num_releases": 0,
        "num_faults": 0,
        "cancel_requested": False,
        "version": 1,
        "idempotency_key": hashed,
        "body_hash": body_hash,
        "request_key": request_key(request),
    }
    num_bytes = count_queued(document, [draft.message for draft in drafts], request.labels)
    stored = None if given.own_worker else find_answer_of_live(database, request, owner)
    if stored is None:
        values["stored_bytes"] = num_bytes
    else:
        values |= {**stored.values, "state": JobState.SUCCEEDED.value}
        drafts += stored.drafts
    try:
        with database.begin() as connection:
            first = None if hashed is None else _find_first(database, connection, hashed)
            if first is None:
                quota = find_quota(connection, owner)
                check_stored(database, connection, owner, quota, sums if stored is None else None, num_bytes)
                if stored is None:
                    check_queued(database, connection, owner, quota)
                columns = {**values, "last_seq": len(drafts)}
                given_time = {} if database.is_postgresql else {"now": database.now(connection)}
                insert = _insert(database.is_postgresql, stored is not None)
                now = connection.execute(insert, columns | given_time).scalar_one()
                if given.own_worker:
                    reserve_job(database, connection, job_id, given.own_worker)
                _insert_labels(connection, job_id, request.labels)
                insert_events(database, connection, job_id, len(drafts), drafts, at=now, is_new=True)
                if stored is not None:
                    insert_if_changed(connection, job_id, len(drafts), stored.recommendation)
                note_action(database, connection, given.by, Action.SUBMIT, job_id, at=now)
    except sa.exc.IntegrityError:  # another submission with the same key was faster
        if hashed is None or given.job_id is not None:  # an id that is taken is no key that is taken
            raise
        with database.read() as connection:
            first = connection.execute(sa.select(jobs).where(jobs.c.idempotency_key == hashed)).one_or_none()
        if first is None:  # and was deleted since
            return insert_submission(database, given, sums)
    if first is None:
        times = {"created_at": now, "queued_at": now, "finished_at": None if stored is None else now}
        return job_from_row(SimpleNamespace(**dict.fromkeys(jobs.c.keys()) | columns | times), request), True
    if not asks_the_same(first, request, body_hash):
        raise IdempotencyConflictError(str(key), first.id)
    return job_from_row(first), False


def stored_key(owner: str, key: str) -> str:
    """Return the stored form of an idempotency key: a hash with the owner, so that owners do not share keys."""
    return hashlib.sha256(f"{owner}\0{key}".encode()).hexdigest()


def _find_first(database: Database, connection: sa.Connection, hashed: str) -> sa.Row[Any] | None:
    """Return the job that a key stands for. The key becomes free if that job is old, has failed or is cancelled."""
    here = jobs.c.idempotency_key == hashed
    is_void = sa.or_(
        jobs.c.state.in_((JobState.FAILED.value, JobState.CANCELLED.value)),
        jobs.c.cancel_requested,
        jobs.c.created_at <= database.clock(-KEY_LIFETIME),
    )
    connection.execute(sa.update(jobs).where(here, is_void).values(idempotency_key=None))
    return connection.execute(sa.select(jobs).where(here)).one_or_none()


def _insert_labels(connection: sa.Connection, job_id: str, given: Mapping[str, str]) -> None:
    """Store the labels of a job, by which lists find it."""
    if given:
        connection.execute(
            sa.insert(labels), [{"job_id": job_id, "key": key, "value": value} for key, value in given.items()]
        )


class JobFinishedError(Exception):
    """The job has succeeded, so there is nothing left to do."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"exploration {job_id} has succeeded: there is nothing left to explore")
        self.job_id = job_id


def resume_job(database: Database, job_id: str, *, by: Caller = LOCAL, own_worker: str = "") -> Job:
    """Queue a job again that was cancelled or has failed; a job that waits or runs stays where it is.

    The attempts and failures of a queued job count from zero again, and its log goes on after the event that ended it.
    Then only the worker called `own_worker` may take the job, or any worker without a name. A job whose own worker
    lives, or that a worker runs, stays with that worker.

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
