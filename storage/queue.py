"""The job queue: every change of a job goes through here.

A job is queued, claimed under a lease, and ends. Each write of a worker carries its owner and its attempt, so a worker
that lost its lease writes nothing. A visible change and its events are written in one transaction.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import sqlalchemy as sa
from pydantic import ValidationError

from explorer.records.event import EventCode, EventDraft, Progress
from explorer.records.recommendation import Answer
from explorer.records.trial import Trial
from explorer.spec.hardware import DeviceReport
from explorer.spec.request import ExplorationRequest
from explorer.spec.target import BEXP, describe_target
from storage.changes import change_job, end_event, end_job, end_values, fence, is_unowned, write_job
from storage.database import Database
from storage.events import insert_events
from storage.jobs import Job, JobState, describe_unreadable, job_from_row, select_job
from storage.leases import Claim, HardwareMismatchError, HeartbeatStatus, Lease, LeaseLostError
from storage.run_reports import find_reported_runs
from storage.tables import UTCDateTime, jobs
from storage.trials import insert_trial, select_trials
from storage.waiting import find_waiting
from storage.workers import LIVE_WITHIN

DEFAULT_LEASE = timedelta(seconds=30)
DEFAULT_MAX_ATTEMPTS = 5
WAITING_GRACE = timedelta(seconds=3)


class IdempotencyConflictError(ValueError):
    """The idempotency key was used for another request."""

    def __init__(self, key: str, job_id: str) -> None:
        super().__init__(f"the idempotency key '{key}' was used for another request (exploration {job_id})")
        self.key = key
        self.job_id = job_id


class Queue:
    """Accepts jobs, gives them to workers, and stores what workers report."""

    def __init__(
        self, database: Database, *, lease: timedelta = DEFAULT_LEASE, max_attempts: int = DEFAULT_MAX_ATTEMPTS
    ) -> None:
        self.database = database
        self.lease = lease
        self.max_attempts = max_attempts

    def enqueue(
        self, request: ExplorationRequest, *, idempotency_key: str | None = None, body_hash: str | None = None
    ) -> tuple[Job, bool]:
        """Store a job and its first event; return it, and whether it is new.

        Args:
            request: what to explore.
            idempotency_key: at most 255 characters; the same key with the same request gives the same job.
            body_hash: two requests are the same if it is equal; default: a hash of the validated content.

        Raises:
            IdempotencyConflictError: the key was used for another request.
        """
        if body_hash is None:
            body_hash = hashlib.sha256(request.model_dump_json().encode()).hexdigest()
        job_id = secrets.token_hex(8)
        drafts = [EventDraft(code=EventCode.WARNING, message=f"Configuration: {text}") for text in request.notices]
        draft = EventDraft(code=EventCode.QUEUED, message=f"Exploration {job_id} of {request.model_name} is queued")
        try:
            with self.database.begin() as connection:
                now = self.database.now(connection)
                connection.execute(
                    sa.insert(jobs).values(
                        id=job_id,
                        state=JobState.QUEUED.value,
                        request=request.model_dump(mode="json"),
                        device_kind=request.device_kind,
                        target=request.target_name,
                        devices_needed=request.devices_needed(),
                        created_at=now,
                        queued_at=now,
                        attempt=0,
                        num_releases=0,
                        cancel_requested=False,
                        last_seq=1 + len(drafts),
                        version=1,
                        idempotency_key=idempotency_key,
                        body_hash=body_hash,
                    )
                )
                insert_events(self.database, connection, job_id, 1 + len(drafts), [draft, *drafts])
                return select_job(connection, job_id), True
        except sa.exc.IntegrityError:
            if idempotency_key is None:
                raise
        with self.database.read() as connection:
            first = connection.execute(sa.select(jobs).where(jobs.c.idempotency_key == idempotency_key)).one()
        if first.body_hash != body_hash:
            raise IdempotencyConflictError(str(idempotency_key), first.id)
        return job_from_row(first), False

    def claim(
        self,
        owner: str,
        *,
        device_kind: str,
        num_devices: int,
        fingerprint: str,
        targets: Mapping[str, str] = MappingProxyType({BEXP: ""}),
        description: str | None = None,
        among: Collection[str] | None = None,
    ) -> Claim | None:
        """Take the oldest job that this worker can run; return null if there is none.

        A job can be claimed if it is queued, or if its worker's lease has run out. `among` restricts the claim to jobs
        with these ids. `targets` has the version of each target that the worker can measure, by name; a job of another
        target is left. `description` of the hardware goes into the event. If another version stored the job and this
        one cannot read it, the job is ended and the next one is taken.
        """
        self._end_abandoned()
        conditions = (
            is_unowned(self.database),
            sa.not_(jobs.c.cancel_requested),
            sa.or_(jobs.c.device_kind.is_(None), jobs.c.device_kind == device_kind),
            jobs.c.target.in_(targets),
            jobs.c.devices_needed <= num_devices,
            sa.or_(jobs.c.fingerprint.is_(None), jobs.c.fingerprint == fingerprint),
            sa.not_(self._is_exhausted()),
            *([jobs.c.id.in_(among)] if among is not None else []),
        )
        oldest = (
            sa.select(jobs.c.id)
            .where(*conditions)
            .order_by(jobs.c.created_at, jobs.c.id)
            .limit(1)
            .with_for_update(skip_locked=True)
            .scalar_subquery()
        )
        take = (
            sa.update(jobs)
            .where(jobs.c.id == oldest)
            .values(
                state=JobState.RUNNING.value,
                owner=owner,
                attempt=jobs.c.attempt + 1,
                lease_expires_at=self.database.clock(self.lease),
                started_at=sa.func.coalesce(jobs.c.started_at, self.database.clock(), type_=UTCDateTime()),
                waiting_reason=None,
                last_seq=jobs.c.last_seq + 1,
                version=jobs.c.version + 1,
            )
            .returning(*jobs.c)
        )
        while True:
            with self.database.read() as connection:  # an idle worker takes no write lock
                if connection.execute(sa.select(jobs.c.id).where(*conditions).limit(1)).first() is None:
                    return None
            with self.database.begin() as connection:
                row = connection.execute(take).one_or_none()
                if row is None:
                    return None
                measured = describe_target(row.target, targets[row.target])
                claim = self._open_claim(connection, job_from_row(row), owner, description, measured)
            if claim is not None:
                return claim

    def pin(self, lease: Lease, report: DeviceReport) -> DeviceReport:
        """Bind the job to the hardware of its first claim; return the report of that hardware.

        What real runs with the same model on such hardware have reached by then becomes a part of the report.

        The job then needs as many devices as it uses there, to share sequences or to train together.

        Raises:
            HardwareMismatchError: the job is bound to other hardware.
            LeaseLostError: the lease is gone.
        """
        with self.database.begin() as connection:
            job = select_job(connection, lease.job_id, lock=True)
            fingerprint = report.hardware.fingerprint
            values: dict[str, Any] = {}
            if not job.report:
                report = report.model_copy(update={"reported_runs": find_reported_runs(connection, job, report)})
                values = {"report": report.model_dump(mode="json"), "fingerprint": fingerprint}
                if job.request is not None:
                    values["devices_needed"] = job.request.devices_needed(report.hardware.num_devices)
            write_job(self.database, connection, lease, **values)
        pinned = job.report or report
        if pinned.hardware.fingerprint != fingerprint:
            raise HardwareMismatchError(job.id, pinned.hardware.describe(), report.hardware.describe())
        return pinned

    def heartbeat(self, lease: Lease) -> HeartbeatStatus:
        """Extend the lease.

        Raises:
            LeaseLostError: the lease is gone.
        """
        beat = (
            sa.update(jobs)
            .where(*fence(lease))
            .values(lease_expires_at=self.database.clock(self.lease))
            .returning(jobs.c.cancel_requested)
        )
        with self.database.begin() as connection:
            return _status(lease, connection.scalars(beat).one_or_none())

    def watch(self, lease: Lease) -> HeartbeatStatus:
        """Return what `heartbeat` returns without extending the lease: a read that can be repeated often.

        Raises:
            LeaseLostError: the lease is gone.
        """
        with self.database.read() as connection:
            query = sa.select(jobs.c.cancel_requested).where(*fence(lease))
            return _status(lease, connection.scalars(query).one_or_none())

    def record(self, lease: Lease, progress: Progress) -> None:
        """Store one step of an exploration, all of it or nothing, and extend the lease.

        A step whose trial is stored already changes nothing: its commit succeeded, and only the confirmation was lost.

        Raises:
            LeaseLostError: the lease is gone, and nothing was written.
        """
        assert not any(draft.code.ends_job for draft in progress.events), "an end is written by finish"
        trial = progress.trial
        with self.database.begin() as connection:
            if trial is not None and select_trials(connection, lease.job_id, number=trial.number) == [trial]:
                progress = Progress()
            self._store(connection, lease, progress, lease_expires_at=self.database.clock(self.lease))

    def finish(
        self,
        lease: Lease,
        state: JobState,
        *,
        answer: Answer | None = None,
        error: str | None = None,
        events: Sequence[EventDraft] = (),
        last: Progress | None = None,
    ) -> None:
        """End a job, and store the `last` step of its exploration and further `events` with it.

        The log ends with exactly one event that says so. If neither holds one, it is made from `state` and `error`.

        Raises:
            LeaseLostError: the lease is gone, and nothing was written.
        """
        assert state.is_final
        last = last or Progress()
        drafts = [*last.events, *events]
        if not any(draft.code.ends_job for draft in drafts):
            drafts.append(end_event(state, error))
        assert [draft.code.ends_job for draft in drafts].index(True) == len(drafts) - 1, "nothing follows the end"
        step = Progress(tuple(drafts), last.trial, last.recommendation, last.space, answer or last.answer)
        with self.database.begin() as connection:
            self._store(connection, lease, step, **end_values(self.database, state, error))

    def release(self, lease: Lease, *, trouble: str | None = None) -> None:
        """Put a job back into the queue that its worker cannot finish; its trials stay.

        If the worker only shuts down, `trouble` is null and the attempt is not counted. Otherwise `trouble` becomes an
        event, and the attempt counts.

        Raises:
            LeaseLostError: the lease is gone.
        """
        drafts = [] if trouble is None else [EventDraft(code=EventCode.WARNING, message=f"Put back: {trouble}")]
        values: dict[str, Any] = {
            "state": JobState.QUEUED.value,
            "owner": None,
            "lease_expires_at": None,
            "queued_at": self.database.clock(),
            "num_releases": jobs.c.num_releases + int(trouble is None),
        }
        with self.database.begin() as connection:
            write_job(self.database, connection, lease, drafts, **values)

    def request_cancel(self, job_id: str) -> Job:
        """Cancel a job: at once if no worker runs it, else as soon as its worker sees this. A finished job stays.

        Raises:
            JobNotFoundError: there is no such job.
        """
        with self.database.begin() as connection:
            job = select_job(connection, job_id, lock=True)
            here = jobs.c.id == job_id
            if job.state.is_final:
                return job
            if job.lease_expires_at is None or job.lease_expires_at <= self.database.now(connection):
                end_job(self.database, connection, [here], JobState.CANCELLED)
            elif not job.cancel_requested:
                change_job(self.database, connection, [here], cancel_requested=True)
            return select_job(connection, job_id)

    def confirm_cancel(self, lease: Lease) -> None:
        """Record that a running job has been stopped because it was cancelled.

        Raises:
            LeaseLostError: the lease is gone.
        """
        self.finish(lease, JobState.CANCELLED)

    def note_waiting(self, *, live_within: timedelta = LIVE_WITHIN, grace: timedelta = WAITING_GRACE) -> None:
        """Append an event to each job that no live worker can serve, whenever the reason changes."""
        self._end_abandoned()
        with self.database.read() as connection:
            overdue = sa.or_(
                (jobs.c.state == JobState.QUEUED.value) & (jobs.c.queued_at < self.database.clock(-grace)),
                (jobs.c.state == JobState.RUNNING.value) & (jobs.c.lease_expires_at < self.database.clock(-grace)),
            )
            changes = find_waiting(self.database, connection, overdue, live_within=live_within)
        for job_id, reason in changes:
            conditions = [
                jobs.c.id == job_id,
                is_unowned(self.database),
                jobs.c.waiting_reason.is_distinct_from(reason),
            ]
            drafts = []
            if reason is not None:
                message = f"Waiting for a worker: {reason}"
                drafts.append(EventDraft(code=EventCode.WAITING, message=message, data={"reason": reason}))
            with self.database.begin() as connection:
                change_job(self.database, connection, conditions, drafts, waiting_reason=reason)

    def _open_claim(
        self, connection: sa.Connection, job: Job, owner: str, description: str | None, target: str
    ) -> Claim | None:
        """Return the claim of a job that `owner` has just taken. If the job cannot be read, end it and return null."""
        lease = Lease(job.id, owner, job.attempt)
        history: tuple[Trial, ...] = ()
        unreadable = job.unreadable
        try:
            history = tuple(select_trials(connection, job.id))
        except ValidationError as error:
            unreadable = unreadable or describe_unreadable("trial", error)
        draft = _claim_event(job, owner, description, target, len(history))
        insert_events(self.database, connection, job.id, job.last_seq, [draft])
        if unreadable is not None or job.request is None:
            end_job(self.database, connection, fence(lease), JobState.FAILED, unreadable)
            return None
        return Claim(job, job.request, lease, history)

    def _is_exhausted(self) -> sa.ColumnElement[bool]:
        return jobs.c.attempt - jobs.c.num_releases >= self.max_attempts

    def _end_abandoned(self) -> None:
        """End the jobs whose worker was lost after a cancellation, or whose workers were lost too often."""
        conditions = [is_unowned(self.database), sa.or_(jobs.c.cancel_requested, self._is_exhausted())]
        with self.database.read() as connection:
            found = connection.execute(sa.select(jobs.c.id, jobs.c.cancel_requested).where(*conditions)).all()
        for row in found:
            with self.database.begin() as connection:
                here = [jobs.c.id == row.id, *conditions]
                if row.cancel_requested:
                    end_job(self.database, connection, here, JobState.CANCELLED)
                else:
                    error = f"given up after {self.max_attempts} attempts that ended with the worker or its device"
                    end_job(self.database, connection, here, JobState.FAILED, error)

    def _store(self, connection: sa.Connection, lease: Lease, step: Progress, **values: Any) -> None:
        if step.space is not None:
            values["space"] = step.space
        if step.recommendation is not None:
            values["recommendation"] = step.recommendation.model_dump(mode="json")
        if step.answer is not None:
            values["answer"] = step.answer.model_dump(mode="json")
        write_job(self.database, connection, lease, step.events, **values)
        if step.trial is not None:
            insert_trial(self.database, connection, lease.job_id, step.trial)


def _claim_event(job: Job, owner: str, description: str | None, target: str, num_trials: int) -> EventDraft:
    where = f"worker {owner}" + (f" ({description})" if description else "")
    data: dict[str, Any] = {"worker": owner, "attempt": job.attempt, "target": target}
    if job.attempt == 1:
        return EventDraft(
            code=EventCode.STARTED, message=f"Exploration started by {where}, measuring {target}", data=data
        )
    stored = f"{num_trials} stored trial{'' if num_trials == 1 else 's'}"
    data["num_trials"] = num_trials
    return EventDraft(code=EventCode.RESUMED, message=f"Exploration resumed by {where} with {stored}", data=data)


def _status(lease: Lease, cancel_requested: bool | None) -> HeartbeatStatus:
    if cancel_requested is None:
        raise LeaseLostError(lease)
    return HeartbeatStatus(cancel_requested)
