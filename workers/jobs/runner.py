"""The run of one claimed job. Each step of its exploration is stored before the next begins.

While the database does not answer, the job holds its step and goes on when it does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from enum import StrEnum
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Protocol, Self, TypeVar

import sqlalchemy as sa

from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.event import EventCode, EventDraft, Progress
from bexp.explorer.records.measurement import Measurement, PhaseSeconds
from bexp.explorer.records.trial import Measure, Trial, TrialExecutor, TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.explore import explore
from bexp.storage.components import keep_components
from bexp.storage.database import DATABASE_TROUBLE
from bexp.storage.jobs import JobState
from bexp.storage.leases import Claim, HardwareMismatchError, Lease, LeaseLostError
from bexp.storage.queue import Queue
from bexp.workers.process.interface import DevicePool, DeviceProfiler, ProfilerError, ProfilerInterruptedError

_log = logging.getLogger(__name__)

POLL = timedelta(seconds=0.5)

T = TypeVar("T")


class Interruption(StrEnum):
    """The reason why a job must not go on."""

    CANCELLED = "cancelled"
    LEASE_LOST = "lease lost"


class LeaseHeartbeat:
    """A thread that extends the lease three times in its duration, and checks for a cancellation every `poll`.

    The thread calls `interrupt` once if the job is cancelled or the lease is lost; `reason` then says which. While the
    database does not answer, the thread goes on trying. Nobody can claim the job meanwhile, and if somebody claims it
    before this worker writes again, the writes are refused.
    """

    def __init__(self, queue: Queue, lease: Lease, interrupt: Callable[[], None], *, poll: timedelta = POLL) -> None:
        self.reason: Interruption | None = None
        self._queue = queue
        self._lease = lease
        self._interrupt = interrupt
        self._poll_seconds = poll.total_seconds()
        self._lease_seconds = queue.settings.lease.total_seconds()
        self._ended = threading.Event()
        self._asking = threading.Lock()
        self._extended_at = time.monotonic()
        self._thread = threading.Thread(target=self._keep, name=f"lease-{lease.job_id}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def end(self, write: Callable[[], T]) -> T:
        """Return the result of `write`, after which the lease is given up, and is not reported as lost."""
        with self._asking:
            written = write()
            self._ended.set()
        return written

    def _keep(self) -> None:
        while not self._ended.wait(self._poll_seconds):
            with self._asking:
                reason = None if self._ended.is_set() else self._ask()
            if reason is not None:
                self._stop(reason)
                return

    def _ask(self) -> Interruption | None:
        """Extend the lease if it is time, and return why the job must not go on."""
        now = time.monotonic()
        try:
            if now - self._extended_at >= self._lease_seconds / 3:
                status = self._queue.heartbeat(self._lease)
                self._extended_at = now
            else:
                status = self._queue.watch(self._lease)
        except LeaseLostError:
            return Interruption.LEASE_LOST
        except sa.exc.SQLAlchemyError as error:
            reason = str(error).splitlines()[0]
            _log.warning("the lease of %s could not be extended: %s", self._lease.job_id, reason)
            return None
        return Interruption.CANCELLED if status.cancel_requested else None

    def _stop(self, reason: Interruption) -> None:
        self.reason = reason
        self._interrupt()


HOST_TROUBLE = (OSError, MemoryError)
"""The worker's host lacks something; the job itself is well."""

FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 5.0


class Explore(Protocol):
    """The signature of `bexp.explorer.search.explore.explore`."""

    def __call__(  # noqa: D102 - the protocol documents it
        self,
        request: ExplorationRequest,
        report: DeviceReport,
        measure: Measure,
        *,
        history: Sequence[Trial] = (),
    ) -> Iterator[Progress]: ...


class JobEnd(StrEnum):
    """The end of a worker's attempt at a job."""

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
    software: Mapping[str, str] = MappingProxyType({}),
) -> JobEnd:
    """Run a job until it ends or is cancelled, its lease is lost, or `stopping` is set.

    Measurements are kept for later jobs on such hardware with the same versions, those of `software` included.

    The caller that sets `stopping` must then interrupt the profiler, so that a trial ends at once. If the device or the
    host cannot go on, the job is put back with the reason.
    """
    with LeaseHeartbeat(queue, claim.lease, profiler.interrupt) as heartbeat:
        run = _JobRun(claim, queue, profiler, heartbeat, stopping, software)
        try:
            return run.explore(explore)
        except (ProfilerInterruptedError, _JobStoppedError, LeaseLostError):
            return run.give_up()
        except (ProfilerError, HardwareMismatchError, *HOST_TROUBLE) as error:
            _log.error("exploration %s is put back: %s", claim.lease.job_id, error)
            return run.put_back(str(error) or type(error).__name__)
        except Exception as error:  # noqa: BLE001 - whatever the search raises, the worker goes on
            _log.exception("exploration %s stopped", claim.lease.job_id)
            return run.report_fault(f"internal error: {type(error).__name__}: {error}")


class _JobRun:
    def __init__(
        self,
        claim: Claim,
        queue: Queue,
        profiler: DeviceProfiler,
        heartbeat: LeaseHeartbeat,
        stopping: threading.Event,
        software: Mapping[str, str],
    ) -> None:
        job = claim.job
        assert job.started_at is not None
        self._claim = claim
        self._queue = queue
        self._profiler = profiler
        self._heartbeat = heartbeat
        self._stopping = stopping
        self._software = software
        self._report: DeviceReport | None = None
        self._trials = [] if job.software is None else list(claim.history)  # of the installed versions alone
        self._account = JobTimings((job.started_at - job.created_at).total_seconds())
        self._replacements: list[EventDraft] = []
        self._last_seq = job.last_seq

    def explore(self, explore: Explore) -> JobEnd:
        claim, account = self._claim, self._account
        report = self._begin()
        with account.spend("storage"):
            pin = partial(self._queue.pin, claim.lease, report, software=self._software)
            self._report = report = self._hold(pin, self.check)
        measure = _Trials(self, self._profiler) if isinstance(self._profiler, DevicePool) else self._measure
        steps = explore(claim.request, report, measure, history=claim.history)
        while True:
            with account.spend("suggest"):
                step = next(steps, None)
            assert step is not None, "an exploration ends with an answer"
            self.check()
            if step.answer is not None:
                return self._finish(step)
            with account.spend("storage"):
                step = self._with_replacements(step)
                record = partial(self._queue.record, claim.lease, step, after_seq=self._last_seq)
                self._last_seq = self._hold(record, self.check)
                self._trials += [] if step.trial is None else [step.trial]

    def give_up(self) -> JobEnd:
        """Confirm the cancellation of a job, or put the job back."""

        def give_up() -> JobEnd:
            if self._queue.watch(self._claim.lease).cancel_requested:
                self._keep_components()
                self._queue.finish(self._claim.lease, JobState.CANCELLED)
                return JobEnd.CANCELLED
            self._queue.release(self._claim.lease)
            return JobEnd.RELEASED

        return self._end(give_up)

    def put_back(self, trouble: str) -> JobEnd:
        """Put the job back because of trouble that is not its own."""

        def put_back() -> JobEnd:
            self._queue.release(self._claim.lease, trouble=trouble)
            return JobEnd.RELEASED

        return self._end(put_back)

    def report_fault(self, error: str) -> JobEnd:
        """Put the job back because of a fault of its own, or end it if that happened too often."""

        def report() -> JobEnd:
            state = self._queue.report_fault(self._claim.lease, error)
            return JobEnd.FAILED if state is JobState.FAILED else JobEnd.RELEASED

        return self._end(report)

    def _hold(self, write: Callable[[], T], check: Callable[[], None]) -> T:
        """Return the result of `write`, repeated while the database is in trouble and `check` does not raise."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                return write()
            except DATABASE_TROUBLE as error:
                _log.warning("exploration %s holds its step: %s", self._claim.job.id, str(error).splitlines()[0])
            check()
            self._stopping.wait(pause)
            check()
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _end(self, end: Callable[[], JobEnd]) -> JobEnd:
        """Return the end of the attempt, which is lost with the lease, or if the worker ends without the database."""
        try:
            return self._hold(partial(self._heartbeat.end, end), self._check_worker)
        except (LeaseLostError, _JobStoppedError):
            return JobEnd.LOST

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

    def _measure(self, task: TrialTask) -> Measurement:
        self.check()
        return self.take(lambda: (task, self._profiler.measure(task)))[1]

    def take(self, wait: Callable[[], tuple[TrialTask, Measurement]]) -> tuple[TrialTask, Measurement]:
        """Wait for a trial, and count its seconds."""
        restarts = self._profiler.restarts
        beside_others = isinstance(self._profiler, DevicePool)
        started = time.perf_counter()
        task, measurement = wait()
        self._account.add_trial(time.perf_counter() - started, measurement.phases, beside_others=beside_others)
        if self._profiler.restarts > restarts:
            reason = measurement.reason or "it could not go on"
            self._replacements.append(
                EventDraft(
                    code=EventCode.PROFILER_REPLACED,
                    message=f"The profiler process is replaced after trial {task.number}: {reason}",
                    data={"trial": task.number, "reason": reason},
                )
            )
        return task, measurement

    def _with_replacements(self, step: Progress) -> Progress:
        drafts, self._replacements = self._replacements, []
        if isinstance(self._profiler, DevicePool):
            drafts += self._profiler.take_events()
        return replace(step, events=(*drafts, *step.events))

    def check(self) -> None:
        """Raise if the job must not go on."""
        if self._heartbeat.reason is not None:
            raise _JobStoppedError
        self._check_worker()

    def _check_worker(self) -> None:
        if self._stopping.is_set():
            raise _JobStoppedError

    def _keep_components(self) -> None:
        """Keep the measurements for later jobs, before the job ends, because its worker may end with it."""
        if self._report is not None:
            claim = self._claim
            keep_components(
                self._queue.database, claim.job.id, claim.request, self._report, self._software, self._trials
            )

    def _finish(self, step: Progress) -> JobEnd:
        assert step.answer is not None
        answer = step.answer.model_copy(update={"timings": self._account.seconds()})
        recommends = answer.recommendation is not None
        last = replace(self._with_replacements(step), answer=answer)
        reason = next((each.reason for each in answer.variants if each.reason is not None), "no feasible candidate")
        state, error = (JobState.SUCCEEDED, None) if recommends else (JobState.FAILED, reason)
        self._hold(self._keep_components, self.check)
        finish = partial(self._queue.finish, self._claim.lease, state, error=error, last=last)
        self._hold(partial(self._heartbeat.end, finish), self.check)
        return JobEnd.SUCCEEDED if recommends else JobEnd.FAILED


class _Trials(TrialExecutor):
    """The trials of a pool. The seconds of each are counted when it ends."""

    def __init__(self, run: _JobRun, pool: DevicePool) -> None:
        self._run = run
        self._pool = pool

    @property
    def capacity(self) -> int:
        return self._pool.capacity

    def submit(self, task: TrialTask) -> None:
        self._run.check()
        self._pool.submit(task)

    def wait(self) -> tuple[TrialTask, Measurement]:
        return self._run.take(self._pool.wait)


PHASES = ("process_start", "build", "warm_up", "timed", "messaging", "suggest", "storage")


class JobTimings:
    """A count of seconds from the claim of a job on. The job was queued for `queued_seconds` before.

    Work of a profiler process before the claim, such as importing torch, is not counted. A trial inside `suggest`
    counts only as a trial, so that the phases do not overlap.
    """

    def __init__(self, queued_seconds: float) -> None:
        self._queued_seconds = queued_seconds
        self._claimed_at = time.perf_counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._busy_seconds = 0.0

    @contextmanager
    def spend(self, phase: str) -> Iterator[None]:
        """Count the seconds of a `with` block for `phase`, without the trials inside it."""
        assert phase in PHASES
        busy = self._busy_seconds
        started = time.perf_counter()
        try:
            yield
        finally:
            wall = time.perf_counter() - started
            self._seconds[phase] += wall - (self._busy_seconds - busy)

    @contextmanager
    def begin(self) -> Iterator[None]:
        """Count the seconds in which the profiler prepares for the job."""
        started = time.perf_counter()
        try:
            yield
        finally:
            wall = time.perf_counter() - started
            self._busy_seconds += wall
            self._seconds["process_start"] += wall

    def add_trial(self, wall_seconds: float, phases: PhaseSeconds, *, beside_others: bool = False) -> None:
        """Count a trial that took `wall_seconds` here and reports `phases`.

        The process start that a trial reports may have happened before it, so only the part that fits into the wall
        time is counted. A trial that ran at the same time as others took longer than the wait for it; its phases are
        scaled to the waiting time.
        """
        measured = phases.model_dump()
        start = measured.pop("process_start")
        if beside_others and (took := sum(measured.values())) > wall_seconds:
            measured = {phase: seconds * wall_seconds / took for phase, seconds in measured.items()}
        for phase, seconds in measured.items():
            self._seconds[phase] += seconds
        self._seconds["process_start"] += min(start, max(0.0, wall_seconds - sum(measured.values())))
        self._busy_seconds += wall_seconds

    def seconds(self) -> dict[str, float]:
        """Return seconds by phase.

        `queue` is the time before the first claim. `total` is the time since the claim of this lease; the phases and
        `other` add up to it. `profiler_idle` is the part of `total` in which the profiler had nothing to do.
        """
        total = time.perf_counter() - self._claimed_at
        seconds = {"queue": self._queued_seconds, **{phase: self._seconds[phase] for phase in PHASES}}
        seconds["other"] = max(0.0, total - sum(self._seconds.values()))
        seconds["total"] = total
        seconds["profiler_idle"] = max(0.0, total - self._busy_seconds)
        return {name: round(value, 6) for name, value in seconds.items()}
