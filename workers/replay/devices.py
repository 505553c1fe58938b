"""Several recorded devices that run trials at the same time, on one virtual clock."""

from __future__ import annotations

from heapq import heappop, heappush

from bexp.explorer.records.measurement import Measurement
from bexp.explorer.records.trial import TrialTask
from bexp.explorer.search.trial_executor import TrialExecutor
from bexp.workers.replay.device import RecordedDevice, VirtualClock
from bexp.workers.replay.recording import Recording


class RecordedDevices(TrialExecutor):
    """A device for each trial in flight. `clock` advances to the end of each trial that is waited for.

    Every device gives the same answer for a component as `RecordedDevice` does.
    """

    def __init__(self, recording: Recording, number: int, *, seed: int, clock: VirtualClock) -> None:
        if number < 1:
            raise ValueError("there must be at least one device")
        self._idle = [RecordedDevice(recording, seed=seed) for _ in range(number)]
        self._capacity = number
        self._clock = clock
        self._running: list[tuple[float, int, TrialTask, Measurement, RecordedDevice]] = []

    @property
    def capacity(self) -> int:
        """The number of devices."""
        return self._capacity

    def submit(self, task: TrialTask) -> None:
        """Give a trial to the device that became idle last."""
        device = self._idle.pop()
        measurement = device(task)
        heappush(self._running, (self._clock() + measurement.phases.total, task.number, task, measurement, device))

    def wait(self) -> tuple[TrialTask, Measurement]:
        """Return the trial that ends first. If several end together, the lowest number comes first."""
        ends, _, task, measurement, device = heappop(self._running)
        self._idle.append(device)
        self._clock.advance(max(0.0, ends - self._clock()))
        return task, measurement
