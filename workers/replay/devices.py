"""Several recorded devices that run trials at the same time, on one virtual clock."""

from __future__ import annotations

from heapq import heappop, heappush

from explorer.records.measurement import Measurement
from explorer.records.trial import TrialPlan
from explorer.search.trial_executor import TrialExecutor
from workers.replay.device import RecordedDevice, VirtualClock
from workers.replay.recording import Recording


class RecordedDevices(TrialExecutor):
    """As many equal devices as trials may be in flight; `clock` goes on to the end of each trial that is waited for.

    Whatever device answers, a component's answer is the one that `RecordedDevice` would give.
    """

    def __init__(self, recording: Recording, number: int, *, seed: int, clock: VirtualClock) -> None:
        if number < 1:
            raise ValueError("there must be a device at least")
        self._idle = [RecordedDevice(recording, seed=seed) for _ in range(number)]
        self._capacity = number
        self._clock = clock
        self._running: list[tuple[float, int, TrialPlan, Measurement, RecordedDevice]] = []

    @property
    def capacity(self) -> int:
        """The number of devices."""
        return self._capacity

    def submit(self, plan: TrialPlan) -> None:
        """Give a trial to the device that has been idle for the shortest time."""
        device = self._idle.pop()
        measurement = device(plan)
        heappush(self._running, (self._clock() + measurement.phases.total, plan.number, plan, measurement, device))

    def wait(self) -> tuple[TrialPlan, Measurement]:
        """The trial that ends first; of those that end together, the one with the lowest number."""
        ends, _, plan, measurement, device = heappop(self._running)
        self._idle.append(device)
        self._clock.advance(max(0.0, ends - self._clock()))
        return plan, measurement
