"""Stores a job that somebody submits."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping

import sqlalchemy as sa

from explorer.records.event import EventCode, EventDraft
from explorer.spec.request import ExplorationRequest
from explorer.spec.request_key import request_key
from storage.database import Database
from storage.events import insert_events
from storage.jobs import Job, JobState, job_from_row, select_row
from storage.notifications import QUEUED_JOBS, notify
from storage.reuse import find_answer_of_live
from storage.tables import jobs, labels


class IdempotencyConflictError(ValueError):
    """The idempotency key was used for another request."""

    def __init__(self, key: str, job_id: str) -> None:
        super().__init__(f"the idempotency key '{key}' was used for another request (exploration {job_id})")
        self.key = key
        self.job_id = job_id


def insert_submission(
    database: Database, request: ExplorationRequest, idempotency_key: str | None, body_hash: str | None
) -> tuple[Job, bool]:
    """Store a job and its first events, as `Queue.enqueue` says."""
    if body_hash is None:
        body_hash = hashlib.sha256(request.model_dump_json().encode()).hexdigest()
    job_id = secrets.token_hex(8)
    document = request.model_dump(mode="json")  # before the transaction, which others wait for
    devices_needed = request.devices_needed()
    drafts = [EventDraft(code=EventCode.WARNING, message=f"Configuration: {text}") for text in request.notices]
    drafts.insert(
        0, EventDraft(code=EventCode.QUEUED, message=f"Exploration {job_id} of {request.model_name} is queued")
    )
    values = {
        "id": job_id,
        "state": JobState.QUEUED.value,
        "request": document,
        "model_name": request.model_name,
        "device_kind": request.device_kind,
        "target": request.target_name,
        "devices_needed": devices_needed,
        "attempt": 0,
        "num_releases": 0,
        "num_faults": 0,
        "cancel_requested": False,
        "version": 1,
        "idempotency_key": idempotency_key,
        "body_hash": body_hash,
        "request_key": request_key(request),
    }
    stored = find_answer_of_live(database, request)
    if stored is not None:
        values |= {**stored.values, "state": JobState.SUCCEEDED.value}
        drafts += stored.drafts
    try:
        with database.begin() as connection:
            now = database.now(connection)
            times = {"created_at": now, "queued_at": now, "finished_at": None if stored is None else now}
            connection.execute(sa.insert(jobs).values(**values, **times, last_seq=len(drafts)))
            _insert_labels(connection, job_id, request.labels)
            insert_events(database, connection, job_id, len(drafts), drafts)
            if stored is None:
                notify(database, connection, QUEUED_JOBS)
            row = select_row(connection, job_id)
        return job_from_row(row), True
    except sa.exc.IntegrityError:
        if idempotency_key is None:
            raise
    with database.read() as connection:
        first = connection.execute(sa.select(jobs).where(jobs.c.idempotency_key == idempotency_key)).one()
    if first.body_hash != body_hash:
        raise IdempotencyConflictError(str(idempotency_key), first.id)
    return job_from_row(first), False


def _insert_labels(connection: sa.Connection, job_id: str, given: Mapping[str, str]) -> None:
    """Store the labels of a job, by which lists find it."""
    if given:
        connection.execute(
            sa.insert(labels), [{"job_id": job_id, "key": key, "value": value} for key, value in given.items()]
        )
