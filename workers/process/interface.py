"""The interface of profilers: of one or several devices of this host, of a cluster, or of a recorded table."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.event import EventDraft
from bexp.explorer.records.measurement import Measurement
from bexp.explorer.records.trial import TrialExecutor, TrialTask
from bexp.explorer.request.request import ExplorationRequest


class ProfilerError(Exception):
    """The device cannot be profiled, whichever candidate is tried."""


class ProfilerStartError(ProfilerError):
    """A profiler process was killed, or the kernel refused to start it, before it was ready. Another may start."""


class ProfilerInterruptedError(Exception):
    """`interrupt()` was called: the process is gone, and nothing was measured."""


class DeviceProfiler(Protocol):
    """A profiler, which measures candidates on a device.

    `interrupt` may be called from any thread. All other methods belong to one thread at a time. `Profiler` documents
    the errors that each method raises.
    """

    devices: tuple[str, ...] = ()
    """The devices as a process of their host names them; in a cluster, those that a trial needs."""
    gpus: Mapping[str, str] = MappingProxyType({})
    """The UUID of each of them that is a GPU of this host, by its name."""
    held_by: str | None = None
    """The other holder of the device, while this profiler waits for it."""

    @property
    def restarts(self) -> int:
        """Number of replaced profiler processes in trials that have been waited for."""
        ...

    @property
    def is_awaited(self) -> bool:
        """Whether another process waits for the devices."""
        return False

    def take(self) -> bool:
        """Take the devices if they are free; return whether they are held, so that `start` need not wait."""
        return True

    def rest(self) -> None:
        """Give the devices back until `take` or `start`, and stop waiting for them."""
        self.held_by = None

    @abstractmethod
    def start(self) -> None:
        """Make at least one device ready. An interrupted profiler becomes usable again."""

    @abstractmethod
    def hardware(self) -> HardwareSpec:
        """Describe each device."""

    @abstractmethod
    def begin(self, request: ExplorationRequest) -> DeviceReport:
        """Announce a job to every device, also to devices that join later."""

    @abstractmethod
    def measure(self, task: TrialTask) -> Measurement:
        """Run a trial while nothing else is in flight."""

    @abstractmethod
    def finish_job(self) -> None:
        """End the job. Processes that it leaves clean stay ready for the next job; the others end."""

    @abstractmethod
    def interrupt(self) -> None:
        """End the running trial. A running call and every later one raise ProfilerInterruptedError until `start`."""

    @abstractmethod
    def close(self) -> None:
        """Release all devices."""


class DevicePool(TrialExecutor, DeviceProfiler):
    """A profiler that runs several trials at the same time."""

    restarts: int = 0

    @abstractmethod
    def take_events(self) -> list[EventDraft]:
        """Return the events since the last call: devices that were lost or left out, trials that began anew."""

    def measure(self, task: TrialTask) -> Measurement:
        """Run a trial while nothing else is in flight."""
        return self(task)
