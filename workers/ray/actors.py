"""The actors of a Ray cluster: those that are ready, those that are awaited, and those that are left out or lost."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from itertools import chain

from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.event import EventCode, EventDraft
from bexp.explorer.request.request import ExplorationRequest
from bexp.workers.process.interface import ProfilerError
from bexp.workers.process.profiler import BEGIN_TRIES
from bexp.workers.ray.cluster import ActorHandle, Cluster, describe_error

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
