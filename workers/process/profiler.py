"""Owns the profiler process of a device or a set of them: starts it, gives it trials, replaces it when one kills it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from explorer.cost_model.components import Component
from explorer.cost_model.step import memory_limit
from explorer.records.measurement import ComponentMeasurement, Measurement, Outcome, PhaseSeconds
from explorer.records.trial import TrialPlan
from explorer.spec.hardware import DeviceReport, HardwareSpec
from explorer.spec.request import ExplorationRequest
from workers.devices.discovery import device_key
from workers.devices.lock import DeviceLocks
from workers.process.child import ProcessEndedError, ProfilerProcess
from workers.process.exit_status import autopsy, count_kernel_oom_kills, describe_status
from workers.process.protocol import (
    Begin,
    ComponentMeasured,
    ComponentStarted,
    HardwareReply,
    Hello,
    MeasureHardware,
    RankLost,
    Refused,
    Reply,
    ReportReply,
    RunTrial,
    TrialFinished,
)

TICK_SECONDS = 0.025
RESIDENT_SLACK_BYTES = 64 << 20
CHILD_DEFAULTS = {
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the numbering that the device locks go by
    "OMP_WAIT_POLICY": "PASSIVE",  # a thread that spins at a barrier keeps the core from the one it waits for
    "PYTHONFAULTHANDLER": "1",
}
GROUP_DEFAULTS = {
    "NCCL_NVLS_ENABLE": "0",  # multicast through NVSwitch needs a fabric that not every host lets a process use
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_SOCKET_IFNAME": "lo",  # all ranks are on this host
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # an error ends its rank, and that the group, without waiting for peers
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # the group has a store, on the loopback interface only
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # a wait that ends without an answer is no warning here
}


class ProfilerError(Exception):
    """The device cannot be profiled at all, whatever the candidate."""


class ProfilerInterruptedError(Exception):
    """`interrupt()` was called: the process is gone, and nothing was measured."""


@dataclass
class _Job:
    request: ExplorationRequest
    memory_limit_bytes: int
    baseline_bytes: int
    others_bytes: int | None


@dataclass
class _Progress:
    components: list[ComponentMeasurement] = field(default_factory=list)
    current: Component | None = None


class Profiler:
    """The parent's end of a device, or of several devices of this host that run trials together.

    `start` waits for the device's lock and starts the process; `begin` announces a job; `measure` runs its trials.
    A process that crashes, hangs or outgrows its memory is replaced before the next trial. `interrupt` may be called
    from any thread; everything else belongs to one thread at a time.

    Args:
        device: `cpu` or `cuda:i`; several for a process on each of them. The CPU may be named more than once.
        environment: of the profiler process, default this process's own.
        on_wait: told once when another profiler holds the device, with the reason.
        lock_timeout_seconds: how long to wait for the device; null for as long as it takes.
        lock_directory: where the host's device locks live; default: the temporary directory.
        start_timeout_seconds: for importing torch, and again for measuring the device.
        setup_allowance_seconds: added to the deadline of each trial.
    """

    def __init__(
        self,
        device: str | Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        on_wait: Callable[[str], None] | None = None,
        lock_timeout_seconds: float | None = None,
        lock_directory: Path | None = None,
        start_timeout_seconds: float = 180.0,
        setup_allowance_seconds: float = 10.0,
    ) -> None:
        self.devices = (device,) if isinstance(device, str) else tuple(device)
        if not self.devices or ("cpu" in self.devices) != (set(self.devices) == {"cpu"}):
            raise ValueError(
                f"a profiler has a device, or several of one kind, not {', '.join(self.devices) or 'none'}"
            )
        self.device = self.devices[0] if len(self.devices) == 1 else f"{{{', '.join(self.devices)}}}"
        self.restarts = 0
        given = dict(os.environ if environment is None else environment)
        self._environment = CHILD_DEFAULTS | (GROUP_DEFAULTS if len(self.devices) > 1 else {}) | given
        if "PYTORCH_ALLOC_CONF" in given and "PYTORCH_CUDA_ALLOC_CONF" not in given:
            del self._environment["PYTORCH_CUDA_ALLOC_CONF"]  # the newer name of the same setting
        keys = [device_key(name, self._environment) for name in self.devices]
        if len(set(keys)) < len(keys) and self.devices[0] != "cpu":
            raise ValueError(f"{self.device} names a device twice")
        self._lock = DeviceLocks(keys, directory=lock_directory)
        self._lock_timeout_seconds = lock_timeout_seconds
        self._on_wait = on_wait
        self._start_timeout_seconds = start_timeout_seconds
        self._setup_allowance_seconds = setup_allowance_seconds
        self._interrupted = threading.Event()
        self._process: ProfilerProcess | None = None
        self._hardware: HardwareSpec | None = None
        self._job: _Job | None = None
        self._start_seconds = 0.0
        # The kernel ends the profiler with the thread that started it (PR_SET_PDEATHSIG), so that thread must stay.
        self._starter: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Of the profiler process, while there is one."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Take the device and start the process; does nothing if it runs. Makes an interrupted profiler usable again.

        Raises:
            ProfilerError: the process cannot be started, or has no such device.
            DeviceBusyError: the device was not free in time.
            ProfilerInterruptedError: `interrupt()` was called meanwhile.
        """
        if self._interrupted.is_set():
            self._discard()
            self._interrupted.clear()
        self._running()

    def hardware(self) -> HardwareSpec:
        """The device, measured once in the life of this object."""
        if self._hardware is None:
            reply = self._ask(self._running(), MeasureHardware())
            if not isinstance(reply, HardwareReply):
                raise self._misunderstood(reply)
            self._hardware = reply.hardware
        return self._hardware

    def begin(self, request: ExplorationRequest) -> DeviceReport:
        """Announce a job: sets its memory limit, and tells which back ends can serve its model."""
        self._job = None
        process = self._running()
        hardware = self.hardware()
        reply = self._begin(process, Begin(request=request, hardware=hardware))
        limit = memory_limit(request, hardware)
        self._job = _Job(request, limit, process.private_bytes(), reply.others_bytes)
        return reply.report

    def measure(self, plan: TrialPlan) -> Measurement:
        """Run a trial. What a candidate does, be it a crash, a hang or an OOM, is in the outcome.

        Raises:
            ProfilerError: no process can be started on the device any more.
            ProfilerInterruptedError: `interrupt()` was called.
        """
        if self._job is None:
            raise ProfilerError("measure() was called before begin()")
        process = self._running()
        start_seconds, self._start_seconds = self._start_seconds, 0.0
        started = time.perf_counter()
        measurement, child_seconds = self._run_trial(process, plan)
        wall = time.perf_counter() - started
        phases = {"process_start": start_seconds}
        if child_seconds is None:
            phases["timed"] = wall  # what was lost with the process
        else:
            phases["messaging"] = max(0.0, wall - child_seconds)
        return measurement.model_copy(update={"phases": measurement.phases.model_copy(update=phases)})

    def interrupt(self) -> None:
        """End the process at once, from any thread; a running call raises ProfilerInterruptedError.

        So does every later call, until `start()`.
        """
        self._interrupted.set()
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process and give the device back."""
        self._job = None
        self._discard()
        self._lock.release()
        if self._starter is not None:
            self._starter.shutdown()
            self._starter = None

    def _running(self) -> ProfilerProcess:
        """The process, started anew if there is none, and told of the job."""
        self._check_interrupted()
        if self._process is not None:
            if self._process.alive:
                return self._process
            self._replace()  # it ended while nobody asked anything of it
        if not self._lock.acquire(
            timeout_seconds=self._lock_timeout_seconds, on_wait=self._on_wait, cancelled=self._interrupted.is_set
        ):
            raise ProfilerInterruptedError("interrupted while waiting for the device")
        started = time.perf_counter()
        if self._starter is None:
            self._starter = ThreadPoolExecutor(1, thread_name_prefix=f"profiler-starter-{self.device}")
        process = self._starter.submit(self._spawn).result()
        self._process = process
        self._check_interrupted()
        reply = self._wait(process)
        if not isinstance(reply, Hello):
            raise self._misunderstood(reply)
        process.adopt(reply.ranks)
        self._check_interrupted()
        self._start_seconds += time.perf_counter() - started
        if self._job is not None and self._hardware is not None:
            job = self._job
            self._begin(process, Begin(request=job.request, hardware=self._hardware, others_bytes=job.others_bytes))
            self._job.baseline_bytes = process.private_bytes()
        return process

    def _spawn(self) -> ProfilerProcess:
        try:
            return ProfilerProcess(self.devices, environment=self._environment, inherited=self._lock.descriptors)
        except OSError as error:
            raise ProfilerError(f"the profiler process cannot be started: {error}") from error

    def _begin(self, process: ProfilerProcess, order: Begin) -> ReportReply:
        reply = self._ask(process, order)
        if not isinstance(reply, ReportReply):
            raise self._misunderstood(reply)
        return reply

    def _ask(self, process: ProfilerProcess, order: MeasureHardware | Begin) -> Reply:
        started = time.perf_counter()
        try:
            process.send(order)
        except ProcessEndedError as error:
            raise self._unusable(process) from error
        reply = self._wait(process)
        self._start_seconds += time.perf_counter() - started
        return reply

    def _wait(self, process: ProfilerProcess) -> Reply:
        """The next reply of a process that is being set up."""
        deadline = time.monotonic() + self._start_timeout_seconds
        while True:
            try:
                reply = process.receive(TICK_SECONDS)
            except ProcessEndedError as error:
                self._check_interrupted()
                raise self._unusable(process) from error
            self._check_interrupted()
            if isinstance(reply, Refused):
                self._discard()
                raise ProfilerError(reply.reason)
            if isinstance(reply, RankLost):
                raise self._unusable(process, reply)
            if reply is not None:
                return reply
            if time.monotonic() >= deadline:
                self._discard()
                raise ProfilerError(
                    f"the profiler of {self.device} did not answer within {self._start_timeout_seconds:g} s"
                )

    def _run_trial(self, process: ProfilerProcess, plan: TrialPlan) -> tuple[Measurement, float | None]:
        """The measurement, and the process's own seconds (None if it did not survive to tell)."""
        assert self._job is not None
        progress = _Progress()
        lost: RankLost | None = None
        kernel_kills = count_kernel_oom_kills()
        allowed = plan.timeout_seconds + self._setup_allowance_seconds
        deadline = time.monotonic() + allowed
        ceiling = self._job.baseline_bytes + self._job.memory_limit_bytes + RESIDENT_SLACK_BYTES
        try:
            process.send(RunTrial(plan=plan))
            while True:
                reply = process.receive(TICK_SECONDS)
                self._check_interrupted()
                if isinstance(reply, TrialFinished):
                    if reply.poisoned:
                        self._replace()
                    return reply.measurement, reply.seconds
                if isinstance(reply, ComponentStarted):
                    progress.current = reply.component
                elif isinstance(reply, ComponentMeasured):
                    progress.components.append(reply.measurement)
                    progress.current = None
                elif isinstance(reply, RankLost):
                    lost = reply
                    raise ProcessEndedError("a rank has ended")  # noqa: TRY301 - as if the group had
                elif reply is not None:
                    raise self._misunderstood(reply)
                if time.monotonic() >= deadline:
                    self._replace()
                    reason = f"no result within {allowed:g} s"
                    return _failure(plan, progress, Outcome.TIMED_OUT, reason), None
                if self.devices[0] == "cpu" and process.private_bytes() > ceiling:
                    self._replace()
                    limit = self._job.memory_limit_bytes / 2**30
                    reason = f"the process outgrew its memory limit of {limit:.2f} GiB"
                    return _failure(plan, progress, Outcome.OUT_OF_MEMORY, reason), None
        except ProcessEndedError:
            self._check_interrupted()
            status = self._replace(grace_seconds=1.0)
            name, status = _ended(status, lost)
            outcome, reason = autopsy(name, status, process.last_words(), count_kernel_oom_kills() > kernel_kills)
            return _failure(plan, progress, outcome, reason), None

    def _check_interrupted(self) -> None:
        if self._interrupted.is_set():
            self._discard()
            raise ProfilerInterruptedError(f"the profiler of {self.device} was interrupted")

    def _replace(self, grace_seconds: float = 0.0) -> int:
        """End the process because of what a candidate did to it; the next call starts another."""
        self.restarts += 1
        return self._discard(grace_seconds)

    def _discard(self, grace_seconds: float = 0.0) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        try:
            return process.end(grace_seconds)
        except TimeoutError as error:
            raise ProfilerError(str(error)) from error

    def _unusable(self, process: ProfilerProcess, lost: RankLost | None = None) -> ProfilerError:
        name, status = _ended(self._discard(grace_seconds=1.0), lost)
        words = process.last_words()
        ended = f"{name} of {self.device} {describe_status(status)}"
        return ProfilerError(f"{ended}: {words}" if words else ended)

    def _misunderstood(self, reply: Reply) -> ProfilerError:
        self._discard()
        return ProfilerError(f"the profiler process of {self.device} answered out of turn: {reply.type}")


def _failure(plan: TrialPlan, progress: _Progress, outcome: Outcome, reason: str) -> Measurement:
    return Measurement(
        candidate=plan.candidate,
        outcome=outcome,
        reason=reason,
        components=tuple(progress.components),
        failed_component=progress.current,
        phases=PhaseSeconds(),
    )


def _ended(status: int, lost: RankLost | None) -> tuple[str, int]:
    """Which process ended first, and how."""
    return ("the profiler process", status) if lost is None else (f"rank {lost.rank} ({lost.device})", lost.status)
