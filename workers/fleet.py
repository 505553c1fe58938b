"""Several equal devices that run the trials of one job at the same time."""

from __future__ import annotations

from abc import abstractmethod

from explorer.events import EventDraft
from explorer.executors import TrialExecutor
from explorer.measurements import Measurement
from explorer.trials import TrialPlan
from workers.device_profiler import DeviceProfiler


class Fleet(TrialExecutor, DeviceProfiler):
    """A profiler that is a `TrialExecutor`."""

    restarts: int = 0

    @abstractmethod
    def take_events(self) -> list[EventDraft]:
        """What is to be told since the last time: devices that were lost or left out, trials that began anew."""

    def measure(self, plan: TrialPlan) -> Measurement:
        """Run a trial while nothing else is in flight."""
        return self(plan)
