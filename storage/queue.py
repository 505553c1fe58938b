"""The job queue: every change of a job goes through here.

A job is queued, claimed under a lease, and ends. Each write of a worker carries its id and its attempt, so a worker
that lost its lease writes nothing. A visible change and its events are written in one transaction.

No transaction validates or dumps a model: a process that is frozen within a transaction keeps SQLite's write lock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import sqlalchemy as sa

from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.event import EventCode, EventDraft, Progress
from bexp.explorer.records.recommendation import Answer
from bexp.explorer.request.request import ExplorationRequest
from bexp.storage.audit import Action, note_action
from bexp.storage.changes import (
    change_job,
    end_job,
    end_values,
    fence,
    find_progress,
    job_end_event,
    progress_values,
    write_job,
)
from bexp.storage.claims import claim_next, end_abandoned
from bexp.storage.components import find_earlier_runs
from bexp.storage.database import Database
from bexp.storage.events import insert_if_changed
from bexp.storage.jobs import Job, JobState, get_job, job_from_row, select_row
from bexp.storage.leases import Claim, HardwareMismatchError, HeartbeatStatus, Lease, LeaseLostError, is_held
from bexp.storage.notifications import QUEUED_JOBS, notify
from bexp.storage.owners import LOCAL, Caller
from bexp.storage.queue_settings import QueueSettings
from bexp.storage.quotas import StoredSums
from bexp.storage.run_reports import find_reported_runs
from bexp.storage.submission import Submission, insert_submission, resume_job
from bexp.storage.tables import jobs
from bexp.storage.trials import insert_trial, trial_values
from bexp.storage.waiting import MAX_WAIT, end_overdue, note_reasons
from bexp.storage.workers import LIVE_WITHIN, WorkerInfo

WAITING_GRACE = timedelta(seconds=3)


class Queue:
    """Accepts jobs, gives them to workers, and stores what workers report."""

    def __init__(self, database: Database, settings: QueueSettings | None = None) -> None:
        self.database = database
        self.settings = settings or QueueSettings()
        self._sums = StoredSums()

    def enqueue(
        self,
        request: ExplorationRequest,
        *,
        idempotency_key: str | None = None,
        priority: int = 0,
        by: Caller = LOCAL,
        job_id: str | None = None,
        own_worker: str = "",
    ) -> tuple[Job, bool]:
        """Store a job and its first event; return it, and whether it is new.

        Args:
            request: what to explore.
            idempotency_key: at most 255 characters; the same key of the same owner with the same request gives the
                same job for KEY_LIFETIME, unless that job failed or was cancelled.
            priority: among the jobs of the owner, the highest is first.
            by: who submits it; the job belongs to its owner.
            job_id: the id of a new job; default: `new_job_id`.
            own_worker: the name of the only worker that may take it; default: any may. No stored answer of another
                worker's hardware serves such a job.

        Raises:
            IdempotencyConflictError: the key was used for another request.
            QueuedQuotaError: the owner has as many jobs in the queue as its quota allows.
            StoredQuotaError: the owner stores as much as its quota allows.
        """
        submission = Submission(request, by, idempotency_key, priority, job_id, own_worker)
        return insert_submission(self.database, submission, self._sums)

    def claim(
        self,
        worker: WorkerInfo,
        *,
        description: str | None = None,
        among: Collection[str] | None = None,
        is_able: Callable[[], bool] = lambda: True,
    ) -> Claim | None:
        """Take the next job that `worker` can run; return None if there is none.

        Owners take turns (`bexp.storage.claims`); within an owner, the highest priority and then the oldest is next.

        A job can be claimed if it is queued, or if its worker's lease has run out, and if `bexp.storage.matching` gives
        it to this worker. A job that this version cannot read is ended, and the next one is taken. A job that a stored
        answer serves is ended with that answer.

        Args:
            worker: who asks.
            description: the hardware, for the event.
            among: the ids of the only jobs to claim; default: any.
            is_able: called once there is a job; false leaves the job to others.

        Raises:
            NewerSchemaError: a later version of this program has upgraded the database, and may have stored the job.
        """
        return claim_next(self.database, self.settings, worker, description=description, among=among, is_able=is_able)

    def pin(
        self, lease: Lease, report: DeviceReport, *, software: Mapping[str, str] = MappingProxyType({})
    ) -> DeviceReport:
        """Bind the job to the hardware of its first claim; return the report of that hardware.

        The report includes the speeds that real runs of the same model have reached on such hardware by then. It also
        includes components that were measured on such hardware with the same versions of torch and of `software`.

        From then on, the job needs as many devices as it uses there.

        Raises:
            HardwareMismatchError: the job is bound to other hardware.
            LeaseLostError: the lease is gone.
        """
        job = get_job(self.database, lease.job_id)  # while the lease is held, nobody else writes the report
        fingerprint = report.hardware.fingerprint
        values: dict[str, Any] = {}
        pinned = job.report
        if pinned is None or pinned.refusal is not None:  # the reason for that refusal may be gone by now
            known: dict[str, Any] = {"reported_runs": find_reported_runs(self.database, job, report)}
            if job.request is not None:
                known["earlier"] = find_earlier_runs(self.database, job.request, report, software)
            pinned = report = report.model_copy(update=known)
            values = {"report": report.model_dump(mode="json"), "fingerprint": fingerprint}
            values["device_name"] = report.hardware.device_name
            if job.request is not None:
                values["devices_needed"] = job.request.devices.needed(report.hardware.num_devices)
        with self.database.begin() as connection:
            write_job(self.database, connection, lease, **values)
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
            .values(lease_expires_at=self.database.clock(self.settings.lease))
            .returning(jobs.c.cancel_requested)
        )
        with self.database.begin() as connection:
            return _status(lease, connection.scalars(beat).one_or_none())

    def watch(self, lease: Lease) -> HeartbeatStatus:
        """Return the status of `heartbeat` without extending the lease: a read that can be repeated often.

        Raises:
            LeaseLostError: the lease is gone.
        """
        with self.database.read() as connection:
            query = sa.select(jobs.c.cancel_requested).where(*fence(lease))
            return _status(lease, connection.scalars(query).one_or_none())

    def record(self, lease: Lease, progress: Progress, *, after_seq: int | None = None) -> int:
        """Store progress, all of it or nothing, and extend the lease; return the log's last seq.

        Args:
            lease: of the job.
            progress: since the last call.
            after_seq: the log's last seq as this worker knows it. If the log has this progress already, nothing is
                written: the commit succeeded, and only its confirmation was lost.

        Raises:
            LeaseLostError: the lease is gone, and nothing was written.
        """
        assert not any(draft.code.ends_job for draft in progress.events), "an end is written by finish"
        values, trial = {**progress_values(progress), "waiting_reason": None}, trial_values(progress.trial)
        if trial is not None:
            values |= {"num_releases": jobs.c.attempt - 1, "num_faults": 0}
        with self.database.begin() as connection:
            values["lease_expires_at"] = self.database.clock(self.settings.lease)
            conditions = [*fence(lease), *([] if after_seq is None else [jobs.c.last_seq == after_seq])]
            last_seq = change_job(self.database, connection, conditions, progress.events, **values)
            if last_seq is None:
                last_seq, is_stored = find_progress(connection, lease, progress, after_seq)
                if is_stored:
                    return last_seq
                last_seq = write_job(self.database, connection, lease, progress.events, **values)
            insert_if_changed(connection, lease.job_id, last_seq, progress.recommendation)
            if trial is not None:
                insert_trial(self.database, connection, lease.job_id, trial)
        return last_seq

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
        """End a job, and store the `last` progress of its exploration and further `events` with it.

        The log ends with exactly one event of an end, which is made from `state` and `error` if none is given.

        Raises:
            LeaseLostError: the lease is gone, and nothing was written.
        """
        assert state.is_final
        last = last or Progress()
        answer = answer or last.answer
        drafts = [*last.events, *events]
        if not any(draft.code.ends_job for draft in drafts):
            drafts.append(job_end_event(state, error))
        assert [draft.code.ends_job for draft in drafts].index(True) == len(drafts) - 1, "nothing follows the end"
        values, trial = progress_values(replace(last, answer=answer)), trial_values(last.trial)
        with self.database.begin() as connection:
            ended = end_values(self.database, state, error)
            last_seq = write_job(self.database, connection, lease, drafts, **values, **ended)
            recommended = last.recommendation if answer is None else answer.recommendation
            insert_if_changed(connection, lease.job_id, last_seq, recommended)
            if trial is not None:
                insert_trial(self.database, connection, lease.job_id, trial)

    def release(self, lease: Lease, *, trouble: str | None = None) -> None:
        """Put a job back into the queue because its worker cannot finish it; its trials stay.

        If the worker only shuts down, `trouble` is None and the attempt is not counted. Otherwise `trouble` becomes an
        event, the attempt counts as the infrastructure's, and the job waits before its next attempt.

        Raises:
            LeaseLostError: the lease is gone.
        """
        with self.database.begin() as connection:
            if trouble is None:
                self._put_back(connection, lease, num_releases=jobs.c.num_releases + 1)
                return
            counts = sa.select(jobs.c.attempt - jobs.c.num_releases).where(*fence(lease))
            num_attempts = connection.scalar(counts) or 0
            draft = EventDraft(code=EventCode.WARNING, message=f"Put back: {trouble}")
            self._put_back(connection, lease, draft, wait=self.settings.pause(num_attempts))

    def report_fault(self, lease: Lease, error: str) -> JobState:
        """Put a job back because its own search failed, or end it after too many failures; return its state.

        Raises:
            LeaseLostError: the lease is gone.
        """
        most = self.settings.max_faults
        count = sa.update(jobs).where(*fence(lease)).values(num_faults=jobs.c.num_faults + 1)
        with self.database.begin() as connection:
            num_faults = connection.scalar(count.returning(jobs.c.num_faults))
            if num_faults is None:
                raise LeaseLostError(lease)
            if num_faults >= most:
                drafts = [job_end_event(JobState.FAILED, error)]
                ended = end_values(self.database, JobState.FAILED, error)
                write_job(self.database, connection, lease, drafts, **ended)
                return JobState.FAILED
            message = f"Put back after an {error} (failure {num_faults} of {most})"
            draft = EventDraft(code=EventCode.WARNING, message=message)
            wait = self.settings.pause(num_faults)
            self._put_back(connection, lease, draft, wait=wait, num_releases=jobs.c.num_releases + 1)
            return JobState.QUEUED

    def request_cancel(self, job_id: str, *, by: Caller = LOCAL, own_worker: str = "", has_ended: bool = False) -> Job:
        """Cancel a job: at once if no worker runs it, else as soon as its worker sees this. A finished job stays.

        With `own_worker`, the job also stays if it is not for the worker of that name. `has_ended` means that the
        process of that worker has ended: nobody runs the job, whatever its lease says.

        Raises:
            JobNotFoundError: there is no such job that `by` sees.
        """
        with self.database.begin() as connection:
            row = select_row(connection, job_id, lock=True, owner=by.sees)
            here = jobs.c.id == job_id
            if not JobState(row.state).is_final and own_worker in {"", row.own_worker}:
                if not row.cancel_requested:
                    note_action(self.database, connection, by, Action.CANCEL, job_id)
                held = connection.scalar(sa.select(jobs.c.id).where(here, is_held(self.database)))
                if held is None or has_ended:
                    end_job(self.database, connection, [here], JobState.CANCELLED)
                elif not row.cancel_requested:
                    change_job(self.database, connection, [here], cancel_requested=True)
                row = select_row(connection, job_id)
        return job_from_row(row)

    def resume(self, job_id: str, *, by: Caller = LOCAL, own_worker: str = "") -> Job:
        """Queue a job again that was cancelled or has failed, as `resume_job` does."""
        return resume_job(self.database, job_id, by=by, own_worker=own_worker)

    def write_notes(self, job_id: str, text: str, *, by: Caller = LOCAL) -> Job:
        """Replace the notes of people on a job, in any state; an empty `text` removes them.

        Raises:
            JobNotFoundError: there is no such job that `by` sees.
        """
        with self.database.begin() as connection:
            row = select_row(connection, job_id, lock=True, owner=by.sees)
            if (row.notes or "") != text:
                change_job(self.database, connection, [jobs.c.id == job_id], notes=text or None, stored_bytes=None)
                note_action(self.database, connection, by, Action.WRITE_NOTES, job_id)
                row = select_row(connection, job_id)
        return job_from_row(row)

    def note_waiting(
        self,
        *,
        live_within: timedelta = LIVE_WITHIN,
        grace: timedelta = WAITING_GRACE,
        max_wait: timedelta = MAX_WAIT,
    ) -> None:
        """Append an event to each job that no live worker can serve, whenever the reason changes.

        A job that has been in the queue for `max_wait` fails with its reason, once the reason has held for
        `live_within`: a live worker would have reported by then.
        """
        end_abandoned(self.database, self.settings, jobs.c.cancel_requested)
        note_reasons(self.database, live_within=live_within, grace=grace)
        end_overdue(self.database, max_wait, noted_for=live_within)

    def _put_back(
        self,
        connection: sa.Connection,
        lease: Lease,
        draft: EventDraft | None = None,
        *,
        wait: timedelta | None = None,
        **values: Any,
    ) -> None:
        values |= {
            "state": JobState.QUEUED.value,
            "worker": None,
            "lease_expires_at": None,
            "queued_at": self.database.clock(),
            "not_before": None if wait is None else self.database.clock(wait),
        }
        write_job(self.database, connection, lease, [] if draft is None else [draft], **values)
        notify(self.database, connection, QUEUED_JOBS)


def _status(lease: Lease, cancel_requested: bool | None) -> HeartbeatStatus:
    if cancel_requested is None:
        raise LeaseLostError(lease)
    return HeartbeatStatus(cancel_requested)
