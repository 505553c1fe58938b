"""Several equal devices that run the trials of one job at the same time."""

from __future__ import annotations

from abc import abstractmethod

from explorer.events import EventDraft
from explorer.executors import TrialExecutor
from explorer.hardware import DeviceReport, HardwareSpec
from explorer.measurements import Measurement
from explorer.requests import ExplorationRequest
from explorer.trials import TrialPlan


class Fleet(TrialExecutor):
    """A `DeviceProfiler` that is a `TrialExecutor`: its calls raise what those of `workers.launcher.Profiler` do.

    `interrupt` may be called from any thread, everything else belongs to one thread at a time.
    """

    restarts: int = 0
    """How often a profiler process was replaced in trials that have been waited for."""

    @abstractmethod
    def start(self) -> None:
        """Have at least one device ready; makes an interrupted fleet usable again."""

    @abstractmethod
    def hardware(self) -> HardwareSpec:
        """What each device of the fleet is."""

    @abstractmethod
    def begin(self, request: ExplorationRequest) -> DeviceReport:
        """Announce a job to every device, those that come later included."""

    @abstractmethod
    def interrupt(self) -> None:
        """End what runs; a running call and every later one raise ProfilerInterruptedError, until `start`."""

    @abstractmethod
    def close(self) -> None:
        """Give all devices back."""

    @abstractmethod
    def take_events(self) -> list[EventDraft]:
        """What is to be told since the last time: devices that were lost or left out, trials that began anew."""

    def measure(self, plan: TrialPlan) -> Measurement:
        """Run a trial while nothing else is in flight."""
        return self(plan)
