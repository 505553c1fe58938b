"""The parent's side of the profiler process of one or several devices: its start, its trials, its replacement."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from bexp.explorer.cost.step import memory_limit
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import Measurement, Outcome, PhaseSeconds
from bexp.explorer.records.trial import TrialKind, TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.workers.devices.discovery import device_key
from bexp.workers.devices.lock import DeviceBusyError, DeviceLocks, lock_folder
from bexp.workers.process.child import ProcessEndedError, ProfilerProcess
from bexp.workers.process.device_process import DeviceProcess
from bexp.workers.process.exit_status import KILLED_HINT
from bexp.workers.process.interface import ProfilerError, ProfilerStartError
from bexp.workers.process.kernel_cache import shrink_cache
from bexp.workers.process.protocol import Begin, EndJob, HardwareReply, MeasureHardware
from bexp.workers.process.start import StartedProcess, process_environment, uses_spares
from bexp.workers.process.trial_run import (
    CommandFailedError,
    CommandRun,
    MemoryCeiling,
    TrialRun,
    UnexpectedReplyError,
)

START_TIMEOUT_SECONDS = 180.0
"""For importing torch, and again for measuring the device."""
START_PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""The pauses before a process that was killed as it started is started again."""

BEGIN_TRIES = 2
"""Processes that a job may fail on before its first trial."""

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Job:
    request: ExplorationRequest
    ceiling: MemoryCeiling
    others_bytes: int | None
    report: DeviceReport


class Profiler:
    """The profiler of one device, or of several devices of this host together, in the parent process.

    `start` waits for the device's lock and starts the process. `begin` announces a job, `measure` runs its trials, and
    `finish_job` ends it. A process that crashes, hangs or exceeds its memory is replaced before the next trial. A
    process that is killed while it starts is started again, after pauses that grow. `interrupt` may be called from any
    thread; everything else belongs to one thread at a time.

    A process serves the next job if each trial left it as it was, none compiled or captured, and the jobs have the same
    allocator. Once a process cannot, a spare is started, so that the next job need not wait. `rest` leaves a spare,
    too.

    Args:
        device: `cpu` or `cuda:i`; several for a process on each of them. The CPU may be named more than once.
        environment: of the profiler process; default: this process's own.
        lock_timeout_seconds: how long to wait for the device; None: as long as it takes.
        lock_directory: where the host's device locks lie; default: see `bexp.workers.devices.lock`.
        setup_allowance_seconds: added to the deadline of each trial.
        start_pauses_seconds: before each further attempt to start a process; empty: there is one attempt.
        spare: whether to start spares while the device is in use; default: see `uses_spares`.
        started: the first process, which a thread that stays has started for these devices in this environment.
    """

    def __init__(
        self,
        device: str | Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        lock_timeout_seconds: float | None = None,
        lock_directory: Path | None = None,
        setup_allowance_seconds: float = 10.0,
        start_pauses_seconds: Sequence[float] = START_PAUSES_SECONDS,
        spare: bool | None = None,
        started: StartedProcess | None = None,
    ) -> None:
        self.devices = (device,) if isinstance(device, str) else tuple(device)
        if not self.devices or ("cpu" in self.devices) != (set(self.devices) == {"cpu"}):
            raise ValueError(
                f"a profiler has a device, or several of one kind, not {', '.join(self.devices) or 'none'}"
            )
        given = os.environ if environment is None else environment
        environment = process_environment(given, self.devices)
        self._given = given
        self.held_by: str | None = None
        keys = [device_key(name, environment) for name in self.devices]
        if len(set(keys)) < len(keys) and self.devices[0] != "cpu":
            raise ValueError(f"{', '.join(self.devices)} names a device twice")
        self.gpus: Mapping[str, str] = {name: key for name, key in zip(self.devices, keys, strict=True) if key != "cpu"}
        self._process = DeviceProcess(
            self.devices,
            DeviceLocks(keys, directory=lock_directory or lock_folder(environment)),
            environment=environment,
            on_wait=self._note_held,
            lock_timeout_seconds=lock_timeout_seconds,
            start_timeout_seconds=START_TIMEOUT_SECONDS,
            started=started,
        )
        self._setup_allowance_seconds = setup_allowance_seconds
        self._start_pauses_seconds = tuple(start_pauses_seconds)
        self._hardware: HardwareSpec | None = None
        self._job: _Job | None = None
        self._prepared: ProfilerProcess | None = None  # the process to which the job was announced
        self._is_clean = True
        self._allocator: str | None = None  # of the jobs that the process has served
        self._uses_spares = uses_spares(self.devices) if spare is None else spare

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The id of the profiler process, None while there is none."""
        process = self._process.current
        return None if process is None else process.pid

    @property
    def restarts(self) -> int:
        """Number of processes that were replaced because a candidate had spoilt them."""
        return self._process.restarts

    def start(self) -> None:
        """Take the device and start the process; does nothing if it runs. An interrupted profiler is usable again.

        Raises:
            ProfilerError: the process cannot be started, or has no such device.
            DeviceBusyError: the device was not free in time.
            ProfilerInterruptedError: `interrupt()` was called meanwhile.
        """
        self._process.resume()
        self._with_process(lambda process: process)

    def prepare(self) -> None:
        """Start a spare, without waiting for it, unless it would disturb another process on the device."""
        if self.take() or self._uses_spares:
            self._process.start_spare()

    def take(self) -> bool:
        """Take the device if it is free; return whether it is held. If not, `held_by` says who holds it."""
        try:
            self._process.locks.try_acquire()
        except DeviceBusyError as error:
            self._note_held(str(error))
            return False
        self.held_by = None
        return True

    @property
    def is_awaited(self) -> bool:
        """Whether another process waits for this profiler's device."""
        return self._process.locks.are_awaited

    def rest(self) -> None:
        """End the process and give the device back, or stop waiting for it. A spare stays for the next start.

        On the CPU there is no spare if another process takes the device now, because a spare would disturb it.

        Raises:
            ProfilerError: the process does not end, and keeps the device.
        """
        if self._process.locks.are_held and (self._uses_spares or not self.is_awaited):
            self._process.start_spare()
        self._process.give_back()
        self.held_by = None

    def hardware(self) -> HardwareSpec:
        """Return the device's hardware, measured once in the life of this object."""
        if self._hardware is None:
            reply = self._with_process(lambda process: self._process.ask(process, MeasureHardware(), HardwareReply))
            self._hardware = reply.hardware
        return self._hardware

    def begin(self, request: ExplorationRequest) -> DeviceReport:
        """Announce a job with its memory limit, and return which back ends can serve its model.

        A process that was ready may crash, hang or run out of memory as it prepares the job. Then another one is asked.
        If that one fails as well, the report refuses the job.
        """
        self._job = None
        if self._allocator not in {None, request.allocator}:
            self._process.end()
        hardware = self.hardware()
        failures: list[CommandFailedError] = []
        while len(failures) < BEGIN_TRIES:
            process = self._with_process(lambda process: process)
            try:
                reply = self._process.begin(process, Begin(request=request, hardware=hardware))
            except CommandFailedError as error:
                _log.warning("the job cannot be prepared: %s", error)
                failures.append(error)
                continue
            ceiling = MemoryCeiling(process.private_bytes(), memory_limit(request, hardware))
            self._job, self._prepared = _Job(request, ceiling, reply.others_bytes, reply.report), process
            self._is_clean, self._allocator = not request.plain_execution.compiles, request.allocator
            self._prepare_next()
            return reply.report
        reasons = dict.fromkeys([*map(str, failures), *([KILLED_HINT] if failures[-1].was_killed else [])])
        return DeviceReport.refused(hardware, f"{BEGIN_TRIES} processes could not prepare it: {'; '.join(reasons)}")

    def measure(self, task: TrialTask) -> Measurement:
        """Run a trial. A candidate's crash, hang or lack of memory is the outcome.

        If a process, or a custom target's, is killed for no known reason, somebody else may have killed it. The trial
        then runs once more on the next process, with a deadline of its own. The second run decides the outcome, and the
        reason names the kill.

        Raises:
            ProfilerError: no process can be started on the device any more.
            ProfilerInterruptedError: `interrupt()` was called.
        """
        first, was_killed = self._run(task)
        if not was_killed:
            return first
        _log.warning("trial %d runs once more: %s", task.number, first.reason)
        second, was_killed_again = self._run(task)
        phases = second.phases
        changes: dict[str, object] = {
            "phases": phases.model_copy(update={"process_start": phases.process_start + first.phases.total})
        }
        if second.outcome is Outcome.OK:
            changes["reason"] = f"{first.reason}; the trial ran once more"
        elif was_killed_again:
            changes["reason"] = f"twice: {second.reason}; {KILLED_HINT}"
        else:
            changes["reason"] = f"{second.reason}; before, {first.reason}, and the trial ran once more"
        return second.model_copy(update=changes)

    def _run(self, task: TrialTask) -> tuple[Measurement, bool]:
        """Run a trial once; return its measurement, and whether its process was killed for no known reason."""
        if self._job is None:
            raise ProfilerError("measure() was called before begin()")
        try:
            process = self._with_process(lambda process: process)
        except CommandFailedError as error:  # a new process was ready, and did not get through the job's beginning
            failed = Measurement(
                candidate=task.candidate,
                outcome=error.outcome,
                reason=f"before the trial: {error}",
                phases=PhaseSeconds(process_start=self._process.take_start_seconds()),
            )
            return failed, error.was_killed
        start_seconds = self._process.take_start_seconds()
        started = time.perf_counter()
        command = CommandRun(
            process,
            allowed_seconds=task.timeout_seconds + self._setup_allowance_seconds,
            ceiling=self._job.ceiling if self.devices[0] == "cpu" else None,
            replace=self._process.replace,
            check_interrupted=self._process.check_interrupted,
        )
        run = TrialRun(command, task)
        try:
            measurement, child_seconds = run.follow()
        except UnexpectedReplyError as error:
            raise self._process.unexpected(error.reply) from error
        is_sound = measurement.outcome in {Outcome.OK, Outcome.UNSUPPORTED}
        self._is_clean &= is_sound and not _leaves_code(task, self._job.request)
        self._prepare_next()
        wall = time.perf_counter() - started
        spent = {"process_start": start_seconds}
        if child_seconds is None:
            spent["timed"] = wall  # the phases are lost with the process
        else:
            spent["messaging"] = max(0.0, wall - child_seconds)
        measurement = measurement.model_copy(update={"phases": measurement.phases.model_copy(update=spent)})
        return measurement, run.was_killed

    def finish_job(self) -> None:
        """End the job. The process stays for the next job if each trial of this one left it as it was.

        A failed trial may leave memory behind. A compiled or captured model leaves code and memory pools.
        """
        job, self._job = self._job, None
        process = self._process.current
        if job is None or process is None or not self._is_clean or self._process.interrupted.is_set():
            self._process.end()
            return
        with suppress(ProcessEndedError):  # the next job starts another
            process.send(EndJob())

    def interrupt(self) -> None:
        """End the process at once, from any thread. A running call raises ProfilerInterruptedError.

        Every later call does, too, until `start()`.
        """
        self._process.interrupt()

    def close(self) -> None:
        """End the process and give the device back. The cache of kernels is made smaller if it has grown too large."""
        self._job = None
        self._process.close()
        shrink_cache(self._given)

    def _note_held(self, reason: str) -> None:
        if self.held_by is None:
            _log.info("waiting for the device: %s", reason)
        self.held_by = reason

    def _prepare_next(self) -> None:
        """Start a spare if the process cannot serve the next job."""
        if self._uses_spares and not self._is_clean:
            self._process.start_spare()

    def _with_process(self, use: Callable[[ProfilerProcess], T]) -> T:
        """Return the result of `use` for the process, which is started again if it is killed meanwhile."""
        for pause in self._start_pauses_seconds:
            try:
                return use(self._ensure_process())
            except ProfilerStartError as error:
                _log.warning("%s; it is started again in %g s", error, pause)
                self._process.interrupted.wait(pause)
        return use(self._ensure_process())

    def _ensure_process(self) -> ProfilerProcess:
        """Return the process, started if there is none, with the job announced to it."""
        process = self._process.ensure()
        self.held_by = None
        if self._prepared is not process:
            self._check_hardware(process)
            self._is_clean, self._allocator = True, None
            if self._job is not None:
                job, hardware = self._job, self.hardware()
                command = Begin(
                    request=job.request,
                    hardware=hardware,
                    others_bytes=job.others_bytes,
                    known_report=job.report,
                )
                self._process.begin(process, command)
                self._is_clean = not job.request.plain_execution.compiles
                self._allocator = job.request.allocator
                self._job = replace(job, ceiling=replace(job.ceiling, baseline_bytes=process.private_bytes()))
            self._prepared = process
        return process

    def _check_hardware(self, process: ProfilerProcess) -> None:
        """Forget the hardware if a process sees another: a driver or a library was replaced, or a GPU divided."""
        known, found = self._hardware, process.hello
        if known is None or found is None or (known.device_name, known.versions) == (found.device_name, found.versions):
            return
        self._hardware = self._job = None
        raise ProfilerError(f"{self._process.name} has changed since it was measured: it was {known.describe()}")


def _leaves_code(task: TrialTask, request: ExplorationRequest) -> bool:
    """Return whether a trial leaves compiled code, or the memory of CUDA graphs, in its process."""
    optimizer = request.training.optimizer.of_library
    if optimizer is not None and optimizer.compiles:
        return True
    if task.kind is TrialKind.WHOLE_MODEL:
        return request.execution_of(task.candidate) is not Execution.EAGER
    return any(component.is_compiled for component in task.components)
