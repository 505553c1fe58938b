"""The devices of a Ray cluster as one pool, which runs a trial on each actor at the same time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.event import EventDraft
from bexp.explorer.records.measurement import Measurement, Outcome
from bexp.explorer.records.trial import TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.workers.process.interface import DevicePool, ProfilerError, ProfilerInterruptedError
from bexp.workers.ray.actor import OpenProfiler, open_profiler
from bexp.workers.ray.actors import TICK_SECONDS, Actors
from bexp.workers.ray.cluster import ActorHandle, Cluster, RunningTrial, describe_error

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
