"""A recorded table instead of a profiler, so that the whole service runs without a device."""

from __future__ import annotations

import threading
from pathlib import Path

from bexp.explorer.cost.collectives import is_communication_timed
from bexp.explorer.model.hardware import BackendSupport, HardwareSpec
from bexp.explorer.model.model import ModelSpec
from bexp.explorer.model.training import Sharding
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import Measurement
from bexp.explorer.records.trial import TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.legal_space import EmptySpaceError
from bexp.storage.workers import REPLAYED
from bexp.workers.process.interface import DeviceProfiler, ProfilerError, ProfilerInterruptedError
from bexp.workers.replay.device import RecordedDevice, VirtualClock
from bexp.workers.replay.recording import Recording

PREFIX = "replay:"
SAME = ("mode", "routing", "plain_execution", "training")
"""Fields of a request that measurements depend on, apart from the model."""


class ReplayProfiler(DeviceProfiler):
    """Serves jobs that a table can answer. Any other job gets the reason why it cannot.

    The device's name says that it is replayed, so that no real device resumes a job that a replay began, or the other
    way round.
    """

    def __init__(self, path: Path) -> None:
        """Read the table.

        Raises:
            RecordingError: `path` is no recorded table.
            OSError: it cannot be read.
        """
        self.recording = Recording.read(path)
        self.clock = VirtualClock.over_real_time()
        self._device: RecordedDevice | None = None
        self._interrupted = threading.Event()

    @property
    def restarts(self) -> int:
        """How often the profiler process would have been replaced."""
        return self._device.replacements if self._device is not None else 0

    def start(self) -> None:
        """Be ready for the next job."""
        self._interrupted.clear()

    def hardware(self) -> HardwareSpec:
        """The recorded device, marked as such."""
        recorded = self.recording.header.report.hardware
        return recorded.model_copy(update={"device_name": f"{recorded.device_name}{REPLAYED}"})

    def begin(self, request: ExplorationRequest) -> DeviceReport:
        """Return the recorded back ends. If the table cannot answer the job, all are unusable, with the reason."""
        self._check_interrupted()
        self._device = RecordedDevice(self.recording, seed=request.seed, clock=self.clock)
        report = self.recording.header.report.model_copy(update={"hardware": self.hardware()})
        reason = mismatch(request, self.recording)
        if reason is None:
            return report
        names = request.attention_backends or (report.default_attention,)
        unusable = tuple(BackendSupport(name=name, usable=False, reason=reason) for name in names)
        return report.model_copy(update={"attention_backends": unusable})

    def measure(self, task: TrialTask) -> Measurement:
        """Answer from the table.

        Raises:
            ProfilerInterruptedError: `interrupt()` was called.
        """
        self._check_interrupted()
        if self._device is None:
            raise ProfilerError("measure() was called before begin()")
        return self._device(task)

    def interrupt(self) -> None:
        """Every later call raises ProfilerInterruptedError, until `start()`."""
        self._interrupted.set()

    def finish_job(self) -> None:
        """End the job."""
        self._device = None

    def close(self) -> None:
        """End the job."""
        self.finish_job()

    def _check_interrupted(self) -> None:
        if self._interrupted.is_set():
            raise ProfilerInterruptedError("the replay was interrupted")


def mismatch(request: ExplorationRequest, recording: Recording) -> str | None:
    """Return why a table cannot answer a request; None if it can."""
    header = recording.header
    recorded = header.request
    table = f"the recorded table '{header.name}'"
    known = [_nameless(model) for model in recorded.space.variants()]
    for model in map(_nameless, request.space.variants()):
        if model not in known:
            return f"{table} is of another model, with {_differences(known[0], model)}"
    for field in SAME:
        if getattr(request, field) != getattr(recorded, field):
            name = field.removeprefix("plain_")
            return f"{table} was recorded with {name} {_short(recorded, field)}, not {_short(request, field)}"
    if not set(request.space.sharding_choices) <= set(recorded.space.sharding_choices):
        return f"{table} was recorded with {_levels(recorded)}, not {_levels(request)}"
    counts = request.space.highest_sharding is not Sharding.NONE or is_communication_timed(
        request, header.report.hardware
    )
    if counts and request.num_devices != recorded.num_devices:
        return f"{table} was recorded for training on {recorded.num_devices} devices, not {request.num_devices}"
    for model in request.space.variants():
        try:
            missing = recording.missing_sizes(request, model)
        except EmptySpaceError:  # the search has a better message for this
            return None
        if missing:
            sizes = ", ".join(str(m) for m in missing)
            return f"{table} lacks components of the micro-batch sizes {sizes}; leave them out of micro_batch_size"
    return None


def _nameless(model: ModelSpec) -> ModelSpec:
    """The model without its name, and with an explicit number of query groups."""
    return model.model_copy(update={"name": "model", "num_query_groups": model.query_groups})


def _differences(recorded: ModelSpec, asked: ModelSpec) -> str:
    """`num_layers 16 instead of 8`, for every field that differs."""
    fields = [name for name in ModelSpec.model_fields if getattr(recorded, name) != getattr(asked, name)]
    return ", ".join(f"{name} {getattr(recorded, name)} instead of {getattr(asked, name)}" for name in fields)


def _levels(request: ExplorationRequest) -> str:
    """The sharding that may be chosen, in words."""
    levels = [level for level in request.space.sharding_choices if level is not None]
    return f"a choice of sharding among {', '.join(levels)}" if levels else "one level of sharding"


def _short(request: ExplorationRequest, field: str) -> str:
    value = getattr(request, field)
    return value if isinstance(value, str) else value.model_dump_json(exclude_defaults=True)
