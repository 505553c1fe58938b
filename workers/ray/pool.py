"""The devices of a Ray cluster as one pool: an actor for each device, or for each group of devices of a host."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from explorer.records.event import EventCode, EventDraft
from explorer.records.measurement import Measurement, Outcome
from explorer.records.trial import TrialPlan
from explorer.spec.hardware import DeviceReport, HardwareSpec
from explorer.spec.request import ExplorationRequest
from workers.process.interface import DevicePool, ProfilerError, ProfilerInterruptedError
from workers.ray.actor import Actor, OpenProfiler, open_profiler

TICK_SECONDS = 0.1
MOST_LOSSES = 2
"""A trial that has lost so many actors is tried once more; after that the loss is its outcome."""
MOST_REPLACEMENTS = 8
"""In the time between two starts of the pool, beside the actors that it starts with."""
CLOSE_SECONDS = 5.0

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Placed:
    """An actor and what it does: `becoming` is the answer to its first orders, `flight` its trial."""

    actor: Any
    group: Any
    becoming: Any = None
    node: str | None = None
    restarts: int = 0
    flight: _Flight | None = None


@dataclass(eq=False)
class _Flight:
    plan: TrialPlan
    losses: int = 0
    answer: Any = None
    deadline: float = 0.0


class RayDevicePool(DevicePool):
    """Has as many actors as the cluster has room for when it starts, and replaces those that are lost while it can.

    All devices must be alike: an actor whose hardware has another fingerprint than the first one's is left out, with
    an event. A trial whose actor is lost, with its node or by itself, begins anew on another; a crash of the profiler
    process below an actor is an outcome, as on a single host.

    Args:
        address: of the cluster, as `ray.init` takes it; `auto` for the one that this host belongs to.
        devices: what a trial needs, as one host names it: `cpu`, `cuda:0`, or several GPUs of one host.
        open_profiler: makes the profiler of an actor, on its node.
        start_timeout_seconds: for the first actor to be ready, and for a replacement when none is left.
        setup_allowance_seconds: beyond its deadline, after which a trial's actor counts as lost.
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
        if not devices or ("cpu" in devices and len(devices) > 1):
            raise ValueError("a trial on the cluster needs one CPU, or one or more GPUs")
        self.address = address
        self.restarts = 0
        self._kind = "CPU" if devices[0] == "cpu" else "GPU"
        # Ray shows an actor its own GPUs only, counted from 0.
        self._devices = ("cpu",) if self._kind == "CPU" else tuple(f"cuda:{i}" for i in range(len(devices)))
        self._open_profiler = open_profiler
        self._start_timeout_seconds = start_timeout_seconds
        self._setup_allowance_seconds = setup_allowance_seconds
        self._ray: Any = None
        self._connected = False
        self._interrupted = threading.Event()
        self._coming: list[_Placed] = []
        self._ready: list[_Placed] = []
        self._waiting: deque[_Flight] = deque()
        self._hardware: HardwareSpec | None = None
        self._request: ExplorationRequest | None = None
        self._report: DeviceReport | None = None
        self._events: list[EventDraft] = []
        self._num_left_out = 0
        self._recruits_left = 0

    @property
    def capacity(self) -> int:
        """Actors that are ready; 1 while all are being replaced."""
        if self._ray is not None:
            self._welcome()
        return max(1, len(self._ready))

    def start(self) -> None:
        """Connect and have at least one actor ready; does nothing if that is so.

        Raises:
            ProfilerError: Ray is not installed, the cluster cannot be reached or has no such device.
            ProfilerInterruptedError: `interrupt()` was called meanwhile.
        """
        if self._interrupted.is_set():
            self.close()
            self._interrupted.clear()
        if self._ray is None:
            self._ray, self._connected = _connect(self.address)
        if not self._ready and not self._coming:
            self._num_left_out, self._recruits_left = 0, sys.maxsize
            self._recruit()
            self._recruits_left = MOST_REPLACEMENTS
        self._await_actor()

    def hardware(self) -> HardwareSpec:
        """Of the first actor that was ready."""
        self._check_interrupted()
        assert self._hardware is not None, "start() was not called"
        return self._hardware

    def begin(self, request: ExplorationRequest) -> DeviceReport:
        """Announce a job to all actors; the report is the first one's."""
        self._check_interrupted()
        self._await_actor()
        self._request, self._report = request, None
        self._coming += self._ready
        for actor in self._ready:
            actor.becoming = actor.actor.begin.remote(request.model_dump_json())
        self._ready = []
        self._await_actor()
        assert self._report is not None
        return self._report

    def submit(self, plan: TrialPlan) -> None:
        """Give a trial to an idle actor, or to the next that is ready."""
        self._check_interrupted()
        if self._request is None:
            raise ProfilerError("measure() was called before begin()")
        self._waiting.append(_Flight(plan))
        self._place()

    def wait(self) -> tuple[TrialPlan, Measurement]:
        """The next trial that ends.

        Raises:
            ProfilerError: no actor is left, and none comes in time.
            ProfilerInterruptedError: `interrupt()` was called.
        """
        idle_since = time.monotonic()
        while True:
            self._check_interrupted()
            self._welcome()
            self._place()
            flying = {actor.flight.answer: actor for actor in self._ready if actor.flight is not None}
            if flying:
                idle_since = time.monotonic()
                done, _ = self._ray.wait(list(flying), num_returns=1, timeout=TICK_SECONDS)
                ended = self._land(flying[done[0]]) if done else self._give_up_late()
                if ended is not None:
                    return ended
            elif not self._coming:
                raise ProfilerError(f"the Ray cluster {self.address} has no device left for a trial")
            elif time.monotonic() - idle_since > self._start_timeout_seconds:
                raise ProfilerError(f"no actor of the Ray cluster {self.address} is ready in time")
            else:
                time.sleep(TICK_SECONDS)

    def interrupt(self) -> None:
        """End soon; the actors go with `close`, or when the pool is started again."""
        self._interrupted.set()

    def close(self) -> None:
        """End all actors and leave the cluster."""
        if self._ray is None:
            return
        actors = [*self._ready, *self._coming]
        self._coming, self._ready, self._request = [], [], None
        self._waiting.clear()
        idle = [actor.actor.close.remote() for actor in actors if actor.flight is None]
        if idle:
            self._ray.wait(idle, num_returns=len(idle), timeout=CLOSE_SECONDS)
        for actor in actors:
            self._dismiss(actor)
        if self._connected:
            self._ray.shutdown()
        self._ray, self._connected = None, False

    def finish_job(self) -> None:
        """End all actors, so that the cluster can serve others."""
        self.close()

    def take_events(self) -> list[EventDraft]:
        """Since the last time."""
        events, self._events = self._events, []
        return events

    # -- actors --------------------------------------------------------------------------------------------------

    def _recruit(self) -> None:
        """Ask for as many actors as the cluster has devices for; those that have to wait come when they can."""
        total = int(self._ray.cluster_resources().get(self._kind, 0.0)) // len(self._devices)
        missing = total - len(self._ready) - len(self._coming) - self._num_left_out
        number = max(0, min(missing, self._recruits_left))
        self._coming += [self._actor() for _ in range(number)]
        self._recruits_left -= number

    def _actor(self) -> _Placed:
        ray, number = self._ray, len(self._devices)
        group, options = None, {"scheduling_strategy": "SPREAD"}
        if number > 1:  # on one host, together or not at all
            group = ray.util.placement_group([{"GPU": number, "CPU": 1}], strategy="STRICT_PACK")
            strategies = importlib.import_module("ray.util.scheduling_strategies")
            options = {"scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(placement_group=group)}
        gpus = number if self._kind == "GPU" else 0
        actor_class = ray.remote(Actor).options(num_cpus=1, num_gpus=gpus, max_restarts=0, **options)
        actor = actor_class.remote(self._devices, self._open_profiler)
        return _Placed(actor, group, becoming=actor.introduce.remote())

    def _welcome(self) -> None:
        """Take in actors that have answered their first orders: what they are, and then what they say of the job."""
        for actor in list(self._coming):
            if not self._ray.wait([actor.becoming], timeout=0)[0]:
                continue
            self._coming.remove(actor)
            try:
                answer = self._ray.get(actor.becoming)
            except self._ray.exceptions.RayError as error:
                self._lose(actor, _reason(error))
                continue
            if actor.node is None:
                actor.node, hardware = answer
                self._introduce(actor, HardwareSpec.model_validate_json(hardware))
            else:
                self._employ(actor, DeviceReport.model_validate_json(answer))

    def _introduce(self, actor: _Placed, hardware: HardwareSpec) -> None:
        self._hardware = self._hardware or hardware
        if hardware.fingerprint != self._hardware.fingerprint:
            self._leave_out(actor, f"its hardware is {hardware.describe()}, not {self._hardware.describe()}")
        elif self._request is not None:
            actor.becoming = actor.actor.begin.remote(self._request.model_dump_json())
            self._coming.append(actor)
        else:
            self._ready.append(actor)

    def _employ(self, actor: _Placed, report: DeviceReport) -> None:
        self._report = self._report or report
        if _usable(report) != _usable(self._report):
            self._leave_out(actor, "other back ends are usable there")
        else:
            self._ready.append(actor)

    def _leave_out(self, actor: _Placed, reason: str) -> None:
        self._dismiss(actor)
        self._num_left_out += 1
        self._tell(f"A device on the node {actor.node} of the cluster is left out: {reason}")

    def _lose(self, actor: _Placed, reason: str) -> None:
        """An actor is gone, or of no use; another is asked for."""
        if actor in self._ready:
            self._ready.remove(actor)
        self._dismiss(actor)
        at = f"on the node {actor.node} " if actor.node is not None else ""
        during = f" in trial {actor.flight.plan.number}" if actor.flight is not None else ""
        self._tell(f"A device {at}of the cluster was lost{during}: {reason}")
        self._recruit()

    def _dismiss(self, actor: _Placed) -> None:
        self._ray.kill(actor.actor)
        if actor.group is not None:
            self._ray.util.remove_placement_group(actor.group)

    def _await_actor(self) -> None:
        """Wait until an actor is ready."""
        deadline = time.monotonic() + self._start_timeout_seconds
        while True:
            self._check_interrupted()
            self._welcome()
            if self._ready:
                return
            if not self._coming:
                told = self._events[-1].message if self._events else f"it has no {self._kind}"
                raise ProfilerError(f"the Ray cluster {self.address} cannot be used: {told}")
            if time.monotonic() >= deadline:
                raise ProfilerError(f"no actor of the Ray cluster {self.address} is ready in time")
            self._ray.wait([actor.becoming for actor in self._coming], num_returns=1, timeout=TICK_SECONDS)

    # -- trials --------------------------------------------------------------------------------------------------

    def _place(self) -> None:
        for actor in self._ready:
            if not self._waiting:
                return
            if actor.flight is None:
                flight = self._waiting.popleft()
                flight.answer = actor.actor.measure.remote(flight.plan.model_dump_json())
                flight.deadline = time.monotonic() + flight.plan.timeout_seconds + self._setup_allowance_seconds
                actor.flight = flight

    def _land(self, actor: _Placed) -> tuple[TrialPlan, Measurement] | None:
        """What an ended trial measured; null if its actor was lost and it begins anew."""
        flight = actor.flight
        assert flight is not None
        try:
            document, restarts = self._ray.get(flight.answer)
        except self._ray.exceptions.RayError as error:
            return self._retry(actor, flight, _reason(error))
        actor.flight = None
        self.restarts += restarts - actor.restarts
        actor.restarts = restarts
        return flight.plan, Measurement.model_validate_json(document)

    def _retry(self, actor: _Placed, flight: _Flight, reason: str) -> tuple[TrialPlan, Measurement] | None:
        """Begin a trial anew whose actor is lost, unless it has lost too many."""
        self._lose(actor, reason)
        flight.losses += 1
        if flight.losses <= MOST_LOSSES:
            self._waiting.appendleft(flight)
            return None
        reason = f"{flight.losses} devices of the cluster were lost in this trial, the last one with: {reason}"
        return flight.plan, Measurement(candidate=flight.plan.candidate, outcome=Outcome.CRASHED, reason=reason)

    def _give_up_late(self) -> tuple[TrialPlan, Measurement] | None:
        """A trial that is far beyond its deadline is on a node that does not answer."""
        for actor in self._ready:
            if actor.flight is not None and time.monotonic() > actor.flight.deadline:
                return self._retry(actor, actor.flight, "it does not answer")
        return None

    def _check_interrupted(self) -> None:
        if self._interrupted.is_set():
            raise ProfilerInterruptedError("the trials on the cluster were interrupted")

    def _tell(self, message: str) -> None:
        _log.warning("%s", message)
        self._events.append(EventDraft(code=EventCode.WARNING, message=message))


def _connect(address: str) -> tuple[Any, bool]:
    """The `ray` module, connected to a cluster; and whether it was not before.

    Raises:
        ProfilerError: it is not installed, or the cluster cannot be reached.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise ProfilerError("Ray is not installed: pip install 'bexp[ray]'") from error
    if ray.is_initialized():
        return ray, False
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ProfilerError(f"the Ray cluster {address} cannot be reached: {error}") from error
    return ray, True


def _usable(report: DeviceReport) -> tuple[object, ...]:
    names = (b.name for b in (*report.attention_backends, *report.expert_backends) if b.usable)
    return (*sorted(names), report.default_attention, report.default_experts)


def _reason(error: BaseException) -> str:
    """The end of what Ray says, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
