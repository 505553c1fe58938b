"""Stores a job that somebody submits."""

from __future__ import annotations

import hashlib
import secrets

import sqlalchemy as sa

from explorer.records.event import EventCode, EventDraft
from explorer.spec.request import ExplorationRequest
from storage.database import Database
from storage.events import insert_events
from storage.idempotency import asks_the_same
from storage.jobs import Job, JobState, job_from_row, select_row
from storage.tables import jobs


class IdempotencyConflictError(ValueError):
    """The idempotency key was used for another request."""

    def __init__(self, key: str, job_id: str) -> None:
        super().__init__(f"the idempotency key '{key}' was used for another request (exploration {job_id})")
        self.key = key
        self.job_id = job_id


def insert_submission(
    database: Database, request: ExplorationRequest, idempotency_key: str | None, body_hash: str | None
) -> tuple[Job, bool]:
    """Store a job and its first event, as `Queue.enqueue` says."""
    if body_hash is None:
        body_hash = hashlib.sha256(request.model_dump_json().encode()).hexdigest()
    job_id = secrets.token_hex(8)
    document = request.model_dump(mode="json")  # before the transaction, which others wait for
    devices_needed = request.devices_needed()
    drafts = [EventDraft(code=EventCode.WARNING, message=f"Configuration: {text}") for text in request.notices]
    draft = EventDraft(code=EventCode.QUEUED, message=f"Exploration {job_id} of {request.model_name} is queued")
    try:
        with database.begin() as connection:
            now = database.now(connection)
            connection.execute(
                sa.insert(jobs).values(
                    id=job_id,
                    state=JobState.QUEUED.value,
                    request=document,
                    model_name=request.model_name,
                    device_kind=request.device_kind,
                    target=request.target_name,
                    devices_needed=devices_needed,
                    created_at=now,
                    queued_at=now,
                    attempt=0,
                    num_releases=0,
                    num_faults=0,
                    cancel_requested=False,
                    last_seq=1 + len(drafts),
                    version=1,
                    idempotency_key=idempotency_key,
                    body_hash=body_hash,
                )
            )
            insert_events(database, connection, job_id, 1 + len(drafts), [draft, *drafts])
            row = select_row(connection, job_id)
        return job_from_row(row), True
    except sa.exc.IntegrityError:
        if idempotency_key is None:
            raise
    with database.read() as connection:
        first = connection.execute(sa.select(jobs).where(jobs.c.idempotency_key == idempotency_key)).one()
    if not asks_the_same(first, request, body_hash):
        raise IdempotencyConflictError(str(idempotency_key), first.id)
    return job_from_row(first), False
