"""A Ray cluster, and its devices as one pool, which runs a trial on each actor at the same time."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.event import EventCode, EventDraft
from bexp.explorer.records.measurement import Measurement, Outcome
from bexp.explorer.records.trial import TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.workers.process.interface import DevicePool, ProfilerError, ProfilerInterruptedError
from bexp.workers.process.profiler import BEGIN_TRIES
from bexp.workers.ray.actor import Actor, OpenProfiler, open_profiler


@dataclass(eq=False)
class RunningTrial:
    """A trial, the number of actors that it has lost, and Ray's reference to its result with its deadline."""

    task: TrialTask
    losses: int = 0
    result: Any = None
    deadline: float = 0.0


@dataclass(eq=False)
class ActorHandle:
    """The handle of an actor: `pending` is the answer to its first commands, `trial` the trial that it runs."""

    actor: Any
    placement_group: Any
    pending: Any = None
    node: str | None = None
    restarts: int = 0
    trial: RunningTrial | None = None


class Cluster:
    """A connection to a cluster.

    Args:
        address: of the cluster, as `ray.init` takes it; `auto`: the one that this host belongs to.
        devices: what an actor needs, as one host names it: `cpu`, `cuda:0`, or several GPUs of one host.
        open_profiler: makes the profiler of an actor, on the actor's node.
    """

    def __init__(self, address: str, devices: Sequence[str], open_profiler: OpenProfiler) -> None:
        if not devices or ("cpu" in devices and len(devices) > 1):
            raise ValueError("a trial on the cluster needs one CPU, or one or more GPUs")
        self.address = address
        self.kind = "CPU" if devices[0] == "cpu" else "GPU"
        # Ray shows an actor only its own GPUs, and counts them from 0.
        self._devices = ("cpu",) if self.kind == "CPU" else tuple(f"cuda:{i}" for i in range(len(devices)))
        self._open_profiler = open_profiler
        self._ray: Any = None
        self._owns_connection = False

    @property
    def is_connected(self) -> bool:
        """Whether `connect` was called, and `disconnect` was not called since."""
        return self._ray is not None

    @property
    def errors(self) -> type[Exception]:
        """The class of all errors of Ray."""
        error: type[Exception] = self._ray.exceptions.RayError
        return error

    def connect(self) -> None:
        """Connect, unless this is done.

        Raises:
            ProfilerError: Ray is not installed, or the cluster cannot be reached.
        """
        if self._ray is not None:
            return
        # Ray reads it when it is imported. Without it SIGTERM ends the worker at once, and its job waits for the lease.
        os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
        try:
            ray: Any = importlib.import_module("ray")
        except ImportError as error:
            raise ProfilerError("Ray is not installed: pip install 'bexp[ray]'") from error
        if not ray.is_initialized():
            try:
                ray.init(address=self.address, log_to_driver=False, configure_logging=False)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ProfilerError(f"the Ray cluster {self.address} cannot be reached: {error}") from error
            self._owns_connection = True
        self._ray = ray

    def disconnect(self) -> None:
        """Leave the cluster, if this object connected to it."""
        if self._owns_connection:
            self._ray.shutdown()
        self._ray, self._owns_connection = None, False

    def count_places(self) -> int:
        """Return the number of actors for which the cluster has devices."""
        return int(self._ray.cluster_resources().get(self.kind, 0.0)) // len(self._devices)

    def start_actor(self) -> ActorHandle:
        """Ask for an actor. It reports when the cluster has devices for it."""
        number = len(self._devices)
        group, options = None, {"scheduling_strategy": "SPREAD"}
        if number > 1:  # all devices on one host, or none
            group = self._ray.util.placement_group([{"GPU": number, "CPU": 1}], strategy="STRICT_PACK")
            strategies = importlib.import_module("ray.util.scheduling_strategies")
            options = {"scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(placement_group=group)}
        gpus = number if self.kind == "GPU" else 0
        actor_class = self._ray.remote(Actor).options(num_cpus=1, num_gpus=gpus, max_restarts=0, **options)
        actor = actor_class.remote(self._devices, self._open_profiler)
        return ActorHandle(actor, group, pending=actor.introduce.remote())

    def end_actor(self, handle: ActorHandle) -> None:
        """Kill an actor and give its devices back."""
        self._ray.kill(handle.actor)
        if handle.placement_group is not None:
            self._ray.util.remove_placement_group(handle.placement_group)

    def wait(self, references: Sequence[Any], seconds: float, *, number: int = 1) -> list[Any]:
        """Wait for the values of `number` references, for `seconds` at most; return those that are ready."""
        done, _ = self._ray.wait(list(references), num_returns=number, timeout=seconds)
        return list(done)

    def get(self, reference: Any) -> Any:
        """Return the value of a reference. Raises one of `errors` if its actor failed."""
        return self._ray.get(reference)


def describe_error(error: BaseException) -> str:
    """Return the last line of Ray's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


MOST_LOSSES = 2
"""A trial that has lost this many actors is tried once more. If that fails too, the loss is its outcome."""


class RayDevicePool(DevicePool):
    """An actor for each device of a cluster, or for each group of devices of a host.

    If an actor is lost, alone or with its node, its trial begins again on another. A crash of the profiler process
    below an actor is an outcome, as on a single host.

    Args:
        address: of the cluster, as `ray.init` takes it; `auto`: the one that this host belongs to.
        devices: what a trial needs, as one host names it: `cpu`, `cuda:0`, or several GPUs of one host.
        open_profiler: makes the profiler of an actor, on the actor's node.
        start_timeout_seconds: for the first actor to be ready, and for a replacement if none is left.
        setup_allowance_seconds: added to a trial's deadline; after that its actor counts as lost.
    """

    def __init__(
        self,
        address: str,
        devices: Sequence[str],
        *,
        open_profiler: OpenProfiler = open_profiler,
        start_timeout_seconds: float = 180.0,
        setup_allowance_seconds: float = 240.0,
    ) -> None:
        self.address = address
        self.devices = tuple(devices)
        self.restarts = 0
        self._cluster = Cluster(address, devices, open_profiler)
        self._actors = Actors(self._cluster, start_timeout_seconds, self._check_interrupted)
        self._start_timeout_seconds = start_timeout_seconds
        self._setup_allowance_seconds = setup_allowance_seconds
        self._interrupted = threading.Event()
        self._waiting: deque[RunningTrial] = deque()

    @property
    def capacity(self) -> int:
        """Number of actors that are ready; 1 while all are being replaced."""
        if self._cluster.is_connected:
            self._actors.admit()
        return max(1, len(self._actors.ready))

    def start(self) -> None:
        """Connect, and make at least one actor ready, unless one is.

        Raises:
            ProfilerError: Ray is not installed, the cluster cannot be reached or has no such device.
            ProfilerInterruptedError: `interrupt()` was called meanwhile.
        """
        self._ask()
        self._actors.wait_for_one()

    def take(self) -> bool:
        """Ask for actors, which may have to wait for their devices; return whether one is ready.

        Raises:
            ProfilerError: as `start` does.
        """
        self._ask()
        is_ready = self._actors.is_one_ready()
        waits = f"no device of the Ray cluster {self.address} is ready; others may have all"
        self.held_by = None if is_ready else waits
        return is_ready

    def hardware(self) -> HardwareSpec:
        """Return the hardware of the first actor that was ready."""
        self._check_interrupted()
        assert self._actors.hardware is not None, "start() was not called"
        return self._actors.hardware

    def begin(self, request: ExplorationRequest) -> DeviceReport:
        """Announce a job to all actors; return the first actor's report."""
        self._check_interrupted()
        return self._actors.begin(request)

    def submit(self, task: TrialTask) -> None:
        """Give a trial to an idle actor, or to the next that is ready."""
        self._check_interrupted()
        if self._actors.request is None:
            raise ProfilerError("measure() was called before begin()")
        self._waiting.append(RunningTrial(task))
        self._assign()

    def wait(self) -> tuple[TrialTask, Measurement]:
        """Wait for the next trial that ends.

        Raises:
            ProfilerError: no actor is left, and none comes in time.
            ProfilerInterruptedError: `interrupt()` was called.
        """
        idle_since = time.monotonic()
        while True:
            self._check_interrupted()
            self._actors.admit()
            self._assign()
            running = {handle.trial.result: handle for handle in self._actors.ready if handle.trial is not None}
            if running:
                idle_since = time.monotonic()
                done = self._cluster.wait(list(running), TICK_SECONDS)
                ended = self._collect(running[done[0]]) if done else self._give_up_overdue()
                if ended is not None:
                    return ended
            elif not self._actors.pending:
                raise ProfilerError(f"the Ray cluster {self.address} has no device left for a trial")
            elif time.monotonic() - idle_since > self._start_timeout_seconds:
                raise ProfilerError(f"no actor of the Ray cluster {self.address} is ready in time")
            else:
                time.sleep(TICK_SECONDS)

    def finish_job(self) -> None:
        """End all actors, so that the cluster can serve others."""
        self.close()

    def rest(self) -> None:
        """End all actors, so that the cluster can serve others."""
        super().rest()
        self.close()

    def interrupt(self) -> None:
        """Make every call raise until `start`. The actors end with `close`, or when the pool is started again."""
        self._interrupted.set()

    def close(self) -> None:
        """End all actors and leave the cluster."""
        if self._cluster.is_connected:
            self._waiting.clear()
            self._actors.close()
            self._cluster.disconnect()

    def take_events(self) -> list[EventDraft]:
        """Return the events since the last call."""
        return self._actors.take_events()

    def _ask(self) -> None:
        if self._interrupted.is_set():
            self.close()
            self._interrupted.clear()
        self._cluster.connect()
        self._actors.ask()

    def _assign(self) -> None:
        for handle in self._actors.ready:
            if not self._waiting:
                return
            if handle.trial is None:
                trial = self._waiting.popleft()
                trial.result = handle.actor.measure.remote(trial.task.model_dump_json())
                # An actor whose profiler is killed runs the trial once more.
                allowed_seconds = 2 * trial.task.timeout_seconds + self._setup_allowance_seconds
                trial.deadline = time.monotonic() + allowed_seconds
                handle.trial = trial

    def _collect(self, handle: ActorHandle) -> tuple[TrialTask, Measurement] | None:
        """The result of a trial that ended; None if its actor was lost and the trial begins again."""
        trial = handle.trial
        assert trial is not None
        try:
            document, restarts = self._cluster.get(trial.result)
        except self._cluster.errors as error:
            return self._retry(handle, trial, describe_error(error))
        handle.trial = None
        self.restarts += restarts - handle.restarts
        handle.restarts = restarts
        return trial.task, Measurement.model_validate_json(document)

    def _retry(self, handle: ActorHandle, trial: RunningTrial, reason: str) -> tuple[TrialTask, Measurement] | None:
        """Begin a trial again after its actor was lost, unless it has lost too many."""
        self._actors.lose(handle, reason)
        trial.losses += 1
        if trial.losses <= MOST_LOSSES:
            self._waiting.appendleft(trial)
            return None
        reason = f"{trial.losses} devices of the cluster were lost in this trial, the last one with: {reason}"
        return trial.task, Measurement(candidate=trial.task.candidate, outcome=Outcome.CRASHED, reason=reason)

    def _give_up_overdue(self) -> tuple[TrialTask, Measurement] | None:
        """Retry a trial that is far beyond its deadline: its node does not answer."""
        for handle in self._actors.ready:
            if handle.trial is not None and time.monotonic() > handle.trial.deadline:
                return self._retry(handle, handle.trial, "it does not answer")
        return None

    def _check_interrupted(self) -> None:
        if self._interrupted.is_set():
            raise ProfilerInterruptedError("the trials on the cluster were interrupted")


TICK_SECONDS = 0.1
MOST_REPLACEMENTS = 8
"""The most replacements of actors between two starts of the pool."""
CLOSE_SECONDS = 5.0

_log = logging.getLogger(__name__)


class Actors:
    """As many actors as the cluster has room for. `ready` can run trials, `pending` have not answered yet.

    All devices must be alike. If the fingerprint of an actor's hardware or its usable back ends differ from the first
    actor's, the actor is left out, with an event.
    """

    def __init__(self, cluster: Cluster, start_timeout_seconds: float, check_interrupted: Callable[[], None]) -> None:
        self.ready: list[ActorHandle] = []
        self.pending: list[ActorHandle] = []
        self.hardware: HardwareSpec | None = None
        self.request: ExplorationRequest | None = None
        self._cluster = cluster
        self._start_timeout_seconds = start_timeout_seconds
        self._check_interrupted = check_interrupted
        self._report: DeviceReport | None = None
        self._events: list[EventDraft] = []
        self._num_left_out = 0
        self._starts_left = 0

    def ask(self) -> None:
        """Ask for actors if there are none."""
        if not self.ready and not self.pending:
            self._num_left_out, self._starts_left = 0, sys.maxsize
            self._fill()
            self._starts_left = MOST_REPLACEMENTS

    def is_one_ready(self) -> bool:
        """Return whether an actor is ready.

        Raises:
            ProfilerError: none is left.
        """
        self._check_interrupted()
        self.admit()
        if not self.ready and not self.pending:
            reason = self._events[-1].message if self._events else f"it has no {self._cluster.kind}"
            raise ProfilerError(f"the Ray cluster {self._cluster.address} cannot be used: {reason}")
        return len(self.ready) > 0

    def begin(self, request: ExplorationRequest) -> DeviceReport:
        """Announce a job to all actors; return the first actor's report."""
        self.wait_for_one()
        self.request, self._report = request, None
        self.pending += self.ready
        for handle in self.ready:
            handle.pending = handle.actor.begin.remote(request.model_dump_json())
        self.ready = []
        self.wait_for_one(tries=BEGIN_TRIES)
        assert self._report is not None
        return self._report

    def admit(self) -> None:
        """Admit the actors that have started, and then those that have reported on the job."""
        for handle in list(self.pending):
            if not self._cluster.wait([handle.pending], 0):
                continue
            self.pending.remove(handle)
            try:
                answer = self._cluster.get(handle.pending)
            except self._cluster.errors as error:
                self.lose(handle, describe_error(error))
                continue
            if handle.node is None:
                handle.node, hardware = answer
                self._check_hardware(handle, HardwareSpec.model_validate_json(hardware))
            else:
                self._check_report(handle, DeviceReport.model_validate_json(answer))

    def wait_for_one(self, *, tries: int = 1) -> None:
        """Wait until an actor is ready, for as long as so many starts and commands may take.

        Raises:
            ProfilerError: none is left, or none becomes ready in time.
        """
        deadline = time.monotonic() + (2 * tries - 1) * self._start_timeout_seconds
        while not self.is_one_ready():
            if time.monotonic() >= deadline:
                raise ProfilerError(f"no actor of the Ray cluster {self._cluster.address} is ready in time")
            self._cluster.wait([handle.pending for handle in self.pending], TICK_SECONDS)

    def lose(self, handle: ActorHandle, reason: str) -> None:
        """End an actor that failed or does not answer, and ask for another."""
        if handle in self.ready:
            self.ready.remove(handle)
        self._cluster.end_actor(handle)
        at = f"on the node {handle.node} " if handle.node is not None else ""
        during = f" in trial {handle.trial.task.number}" if handle.trial is not None else ""
        self._warn(f"A device {at}of the cluster was lost{during}: {reason}")
        self._fill()

    def close(self) -> None:
        """End all actors. Those that run no trial first end their profiler processes."""
        handles = [*self.ready, *self.pending]
        self.pending, self.ready, self.request = [], [], None
        closing = [handle.actor.close.remote() for handle in handles if handle.trial is None]
        if closing:
            self._cluster.wait(closing, CLOSE_SECONDS, number=len(closing))
        for handle in handles:
            self._cluster.end_actor(handle)

    def take_events(self) -> list[EventDraft]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def _fill(self) -> None:
        """Ask for as many actors as the cluster has devices for. Some may have to wait for their devices."""
        missing = self._cluster.count_places() - len(self.ready) - len(self.pending) - self._num_left_out
        number = max(0, min(missing, self._starts_left))
        self.pending += [self._cluster.start_actor() for _ in range(number)]
        self._starts_left -= number

    def _check_hardware(self, handle: ActorHandle, hardware: HardwareSpec) -> None:
        self.hardware = self.hardware or hardware
        if hardware.fingerprint != self.hardware.fingerprint:
            self._leave_out(handle, f"its hardware is {hardware.describe()}, not {self.hardware.describe()}")
        elif self.request is not None:
            handle.pending = handle.actor.begin.remote(self.request.model_dump_json())
            self.pending.append(handle)
        else:
            self.ready.append(handle)

    def _check_report(self, handle: ActorHandle, report: DeviceReport) -> None:
        self._report = self._report or report
        if _usable(report) != _usable(self._report):
            self._leave_out(handle, "other back ends are usable there")
        else:
            self.ready.append(handle)

    def _leave_out(self, handle: ActorHandle, reason: str) -> None:
        self._cluster.end_actor(handle)
        self._num_left_out += 1
        self._warn(f"A device on the node {handle.node} of the cluster is left out: {reason}")

    def _warn(self, message: str) -> None:
        _log.warning("%s", message)
        self._events.append(EventDraft(code=EventCode.WARNING, message=message))


def _usable(report: DeviceReport) -> tuple[object, ...]:
    names = (
        b.name
        for b in (*report.attention_backends, *report.expert_backends, *chain(*report.choices.values()))
        if b.usable
    )
    return (*sorted(names), report.default_attention, report.default_experts)
