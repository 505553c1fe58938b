"""What runs trials on a device, or on several: on this host, on a cluster, or from a recorded table."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

from explorer.records.event import EventDraft
from explorer.records.measurement import Measurement
from explorer.records.trial import TrialPlan
from explorer.search.trial_executor import TrialExecutor
from explorer.spec.hardware import DeviceReport, HardwareSpec
from explorer.spec.request import ExplorationRequest


class DeviceProfiler(Protocol):
    """What a job, and an actor on a cluster, need of `workers.process.profiler.Profiler`; see there for what each call raises.

    `interrupt` may be called from any thread, everything else belongs to one thread at a time.
    """

    @property
    def restarts(self) -> int:
        """How often a profiler process was replaced in trials that have been waited for."""
        ...

    @abstractmethod
    def start(self) -> None:
        """Have at least one device ready; makes an interrupted profiler usable again."""

    @abstractmethod
    def hardware(self) -> HardwareSpec:
        """What each device is."""

    @abstractmethod
    def begin(self, request: ExplorationRequest) -> DeviceReport:
        """Announce a job to every device, those that come later included."""

    @abstractmethod
    def measure(self, plan: TrialPlan) -> Measurement:
        """Run a trial while nothing else is in flight."""

    @abstractmethod
    def interrupt(self) -> None:
        """End what runs; a running call and every later one raise ProfilerInterruptedError, until `start`."""

    @abstractmethod
    def close(self) -> None:
        """Give all devices back."""


class DevicePool(TrialExecutor, DeviceProfiler):
    """A profiler that is a `TrialExecutor`."""

    restarts: int = 0

    @abstractmethod
    def take_events(self) -> list[EventDraft]:
        """What is to be told since the last time: devices that were lost or left out, trials that began anew."""

    def measure(self, plan: TrialPlan) -> Measurement:
        """Run a trial while nothing else is in flight."""
        return self(plan)
