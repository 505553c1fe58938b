"""Runs one claimed job. Each step of its exploration is stored before the next begins."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from typing import Protocol

import sqlalchemy as sa

from explorer.records.event import EventCode, EventDraft, Progress
from explorer.records.measurement import Measurement
from explorer.records.trial import Measure, Trial, TrialPlan
from explorer.search.candidate_study import CopyStudy
from explorer.search.explore import explore
from explorer.search.trial_executor import TrialExecutor
from explorer.spec.hardware import DeviceReport
from explorer.spec.request import ExplorationRequest
from storage.jobs import JobState
from storage.leases import Claim, HardwareMismatchError, LeaseLostError
from storage.queue import Queue
from storage.studies import StudyCopy
from workers.jobs.heartbeat import Interruption, LeaseHeartbeat
from workers.jobs.timings import JobTimings
from workers.process.interface import DevicePool, DeviceProfiler, ProfilerError, ProfilerInterruptedError

DATABASE_TROUBLE = (
    sa.exc.OperationalError,
    sa.exc.InterfaceError,
    sa.exc.TimeoutError,
)
"""The database cannot be reached or is too busy; the job itself is well."""

_log = logging.getLogger(__name__)


class Explore(Protocol):
    """The signature of `explorer.search.explore.explore`."""

    def __call__(  # noqa: D102 - the protocol documents it
        self,
        request: ExplorationRequest,
        report: DeviceReport,
        measure: Measure,
        *,
        history: Sequence[Trial] = (),
        copy_study: CopyStudy | None = None,
    ) -> Iterator[Progress]: ...


class JobEnd(StrEnum):
    """How a worker's attempt at a job ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    RELEASED = "released"
    LOST = "lost"


class _JobStoppedError(Exception):
    """The job must not go on, because the worker ends, or the job is cancelled, or its lease is lost."""


def run_job(
    claim: Claim,
    queue: Queue,
    profiler: DeviceProfiler,
    *,
    stopping: threading.Event,
    explore: Explore = explore,
) -> JobEnd:
    """Run a job until it ends or is cancelled, its lease is lost, or `stopping` is set.

    The caller that sets `stopping` must then interrupt the profiler, so that a trial ends at once.

    Raises:
        ProfilerError: the device cannot be used; the job has been put back.
        sqlalchemy.exc.SQLAlchemyError: the database cannot be used; the lease is left to expire.
    """
    lease = claim.lease
    with LeaseHeartbeat(queue, lease, profiler.interrupt) as heartbeat:
        run = _Run(claim, queue, profiler, heartbeat, stopping)
        try:
            return run.explore(explore)
        except (ProfilerInterruptedError, _JobStoppedError, LeaseLostError):
            return _give_up(claim, queue, heartbeat)
        except ProfilerError as error:
            with suppress(LeaseLostError):
                queue.release(lease, trouble=str(error))
            raise
        except HardwareMismatchError as error:
            queue.release(lease, trouble=str(error))
            return JobEnd.RELEASED
        except DATABASE_TROUBLE:
            raise
        except Exception as error:  # noqa: BLE001 - a fault of the search must end this job, not the worker
            _log.exception("exploration %s failed", lease.job_id)
            return _fail(claim, queue, f"internal error: {type(error).__name__}: {error}")


class _Run:
    def __init__(
        self,
        claim: Claim,
        queue: Queue,
        profiler: DeviceProfiler,
        heartbeat: LeaseHeartbeat,
        stopping: threading.Event,
    ) -> None:
        job = claim.job
        assert job.started_at is not None
        self._claim = claim
        self._queue = queue
        self._profiler = profiler
        self._heartbeat = heartbeat
        self._stopping = stopping
        self._account = JobTimings((job.started_at - job.created_at).total_seconds())
        self._replacements: list[EventDraft] = []

    def explore(self, explore: Explore) -> JobEnd:
        claim, account = self._claim, self._account
        report = self._begin()
        with account.spend("storage"):
            report = self._queue.pin(claim.lease, report)
        studies = StudyCopy(self._queue.database, claim.lease)
        try:
            measure = _Trials(self, self._profiler) if isinstance(self._profiler, DevicePool) else self._measure
            steps = explore(claim.request, report, measure, history=claim.history, copy_study=studies)
            while True:
                with account.spend("suggest"):
                    step = next(steps, None)
                assert step is not None, "an exploration ends with an answer"
                self.check()
                if step.answer is not None:
                    return self._finish(step)
                with account.spend("storage"):
                    self._queue.record(claim.lease, self._with_replacements(step))
        finally:
            studies.close()

    def _begin(self) -> DeviceReport:
        request = self._claim.request
        with self._account.begin():
            try:
                self._profiler.start()
                return self._profiler.begin(request)
            except ProfilerError as error:  # the process may have ended while it waited for a job
                _log.warning("the profiler is started again: %s", error)
                self.check()
                self._profiler.start()
                return self._profiler.begin(request)

    def _measure(self, plan: TrialPlan) -> Measurement:
        self.check()
        return self.take(lambda: (plan, self._profiler.measure(plan)))[1]

    def take(self, wait: Callable[[], tuple[TrialPlan, Measurement]]) -> tuple[TrialPlan, Measurement]:
        """Wait for a trial, and count its seconds."""
        restarts = self._profiler.restarts
        beside_others = isinstance(self._profiler, DevicePool)
        started = time.perf_counter()
        plan, measurement = wait()
        self._account.add_trial(time.perf_counter() - started, measurement.phases, beside_others=beside_others)
        if self._profiler.restarts > restarts:
            reason = measurement.reason or "it could not go on"
            self._replacements.append(
                EventDraft(
                    code=EventCode.PROFILER_REPLACED,
                    message=f"The profiler process is replaced after trial {plan.number}: {reason}",
                    data={"trial": plan.number, "reason": reason},
                )
            )
        return plan, measurement

    def _with_replacements(self, step: Progress) -> Progress:
        drafts, self._replacements = self._replacements, []
        if isinstance(self._profiler, DevicePool):
            drafts += self._profiler.take_events()
        return replace(step, events=(*drafts, *step.events))

    def check(self) -> None:
        """Raise if the job must not go on."""
        if self._heartbeat.reason is not None or self._stopping.is_set():
            raise _JobStoppedError

    def _finish(self, step: Progress) -> JobEnd:
        assert step.answer is not None
        answer = step.answer.model_copy(update={"timings": self._account.seconds()})
        found = answer.recommendation is not None
        self._queue.finish(
            self._claim.lease,
            JobState.SUCCEEDED if found else JobState.FAILED,
            error=None if found else "no feasible candidate",
            last=replace(self._with_replacements(step), answer=answer),
        )
        return JobEnd.SUCCEEDED if found else JobEnd.FAILED


class _Trials(TrialExecutor):
    """The trials of a pool. The seconds of each are counted when it ends."""

    def __init__(self, run: _Run, pool: DevicePool) -> None:
        self._run = run
        self._pool = pool

    @property
    def capacity(self) -> int:
        return self._pool.capacity

    def submit(self, plan: TrialPlan) -> None:
        self._run.check()
        self._pool.submit(plan)

    def wait(self) -> tuple[TrialPlan, Measurement]:
        return self._run.take(self._pool.wait)


def _give_up(claim: Claim, queue: Queue, heartbeat: LeaseHeartbeat) -> JobEnd:
    """Confirm the cancellation of a job, or put the job back."""
    try:
        if heartbeat.reason is Interruption.CANCELLED or queue.watch(claim.lease).cancel_requested:
            queue.confirm_cancel(claim.lease)
            return JobEnd.CANCELLED
        queue.release(claim.lease)
    except LeaseLostError:
        return JobEnd.LOST
    return JobEnd.RELEASED


def _fail(claim: Claim, queue: Queue, error: str) -> JobEnd:
    try:
        queue.finish(claim.lease, JobState.FAILED, error=error)
    except LeaseLostError:
        return JobEnd.LOST
    return JobEnd.FAILED
