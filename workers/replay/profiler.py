"""A recorded table instead of a profiler, so that the whole service runs without a device."""

from __future__ import annotations

import math
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bexp.explorer.cost.collectives import is_communication_timed
from bexp.explorer.cost.components import Component
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.place import EmptySpaceError
from bexp.explorer.model.hardware import BackendSupport, HardwareSpec
from bexp.explorer.model.model import ModelSpec
from bexp.explorer.model.training import Sharding
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import (
    ComponentMeasurement,
    Measurement,
    Outcome,
    PhaseSeconds,
    WholeModelMeasurement,
)
from bexp.explorer.records.trial import TrialKind, TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.storage.workers import REPLAYED
from bexp.workers.process.interface import DeviceProfiler, ProfilerError, ProfilerInterruptedError
from bexp.workers.replay.recording import ComponentRow, Recording, WholeModelRow

SAME = ("mode", "routing", "plain_execution", "training")
"""Fields of a request that measurements depend on, apart from the model."""


class ReplayProfiler(DeviceProfiler):
    """A profiler of jobs that a table can answer. Any other job is refused with the reason.

    The device's name says that it is replayed, so that no real device resumes a job that a replay began, nor the
    reverse.
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
        """Number of times that the profiler process would have been replaced."""
        return self._device.replacements if self._device is not None else 0

    def start(self) -> None:
        """Get ready for the next job."""
        self._interrupted.clear()

    def hardware(self) -> HardwareSpec:
        """Return the recorded device, marked as such."""
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
        """Make every later call raise ProfilerInterruptedError, until `start()`."""
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


class VirtualClock:
    """A clock of recorded trials' seconds, added to those of `real` (default: a clock that stands still)."""

    def __init__(self, real: Callable[[], float] | None = None) -> None:
        self._real = real or (lambda: 0.0)
        self._virtual = 0.0

    def __call__(self) -> float:
        """Return the time now."""
        return self._real() + self._virtual

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self._virtual += seconds

    @classmethod
    def over_real_time(cls) -> VirtualClock:
        """Return a clock on which real time passes, too."""
        return cls(time.perf_counter)


class RecordedDevice:
    """A `Measure` over a table.

    The answer for a component is one of its recorded runs. The seed of the draw depends on the component, so the answer
    depends neither on the order of trials nor on a restart. If a trial measures components again, its number is part
    of the seed. A bootstrap of few runs underestimates their variance (Efron, 1982). So with R runs, the distance of a
    run from their mean is widened by sqrt(R / (R - 1)). A single run is moved by its standard error. A component that
    was never recorded is `unsupported`.
    """

    def __init__(self, recording: Recording, *, seed: int, clock: VirtualClock | None = None) -> None:
        self.recording = recording
        self.clock = clock or VirtualClock()
        self.replacements = 0
        self._seed = seed
        self._restarting = False

    def __call__(self, task: TrialTask) -> Measurement:
        """Answer a task. The phases hold the recorded seconds."""
        measurement = self._whole_model(task) if task.kind is TrialKind.WHOLE_MODEL else self._components(task)
        if self._restarting:
            start = self.recording.header.process_start_seconds
            phases = measurement.phases.model_copy(update={"process_start": start})
            measurement = measurement.model_copy(update={"phases": phases})
        self._restarting = self._replaces(task, measurement)
        self.replacements += self._restarting
        self.clock.advance(measurement.phases.total)
        return measurement

    def draw(self, component: Component, again: int | None = None) -> ComponentRow | None:
        """Draw a run of a component, with the recorded noise; None if the component was never recorded.

        `again` is the number of a trial that measures the component once more.
        """
        rows = self.recording.components.get(component)
        if not rows:
            return None
        seed = [self._seed, zlib.crc32(component.key.encode())]
        rng = np.random.default_rng(seed if again is None else [*seed, again])
        row = rows[int(rng.integers(len(rows)))]
        if row.figures is None:
            return row
        well = [r.figures.device_seconds for r in rows if r.figures is not None]
        factor = _factor(row.figures.device_seconds, well, row.figures.standard_error_seconds, rng)
        figures = row.figures
        waits = figures.host_seconds == figures.device_seconds  # host and device had the same time
        device = factor * figures.device_seconds
        return row.model_copy(
            update={
                "figures": figures.model_copy(
                    update={
                        "device_seconds": device,
                        "forward_device_seconds": factor * figures.forward_device_seconds,
                        "host_seconds": device if waits else figures.host_seconds,
                    }
                )
            }
        )

    def _components(self, task: TrialTask) -> Measurement:
        measured: list[ComponentMeasurement] = []
        phases: list[PhaseSeconds] = []
        outcome, reason, failed = Outcome.OK, None, None
        for component in task.components:
            row = self.draw(component, task.number if task.again else None)
            if row is None:
                outcome, reason, failed = Outcome.UNSUPPORTED, "never recorded", component
                break
            phases.append(row.phases)
            if row.figures is None:
                outcome, reason, failed = row.outcome, row.reason, component
                break
            measured.append(row.measurement())
        return Measurement(
            candidate=task.candidate,
            outcome=outcome,
            reason=reason,
            components=tuple(measured),
            failed_component=failed,
            phases=_sum(phases),
        )

    def _whole_model(self, task: TrialTask) -> Measurement:
        row = self._draw_whole_model(task.candidate)
        if row is None:
            return Measurement(
                candidate=task.candidate,
                outcome=Outcome.UNSUPPORTED,
                reason="the recorded table has no run of its whole model",
            )
        return Measurement(
            candidate=task.candidate,
            outcome=row.outcome,
            reason=row.reason,
            whole_model=row.figures,
            phases=row.phases,
        )

    def _draw_whole_model(self, candidate: Candidate) -> WholeModelRow | None:
        rows = self.recording.whole_models.get(candidate)
        if not rows:
            return None
        rng = np.random.default_rng([self._seed, zlib.crc32(candidate.describe().encode())])
        row = rows[int(rng.integers(len(rows)))]
        if row.figures is None:
            return row
        figures: WholeModelMeasurement = row.figures
        well = [r.figures.micro_step_seconds for r in rows if r.figures is not None]
        factor = _factor(figures.micro_step_seconds, well, figures.standard_error_seconds, rng)
        moved = figures.model_copy(update={"micro_step_seconds": factor * figures.micro_step_seconds})
        return row.model_copy(update={"figures": moved})

    def _replaces(self, task: TrialTask, measurement: Measurement) -> bool:
        if task.kind is TrialKind.WHOLE_MODEL:
            return any(r.replaced for r in self.recording.whole_models.get(task.candidate, ()))
        failed = measurement.failed_component
        return failed is not None and any(r.replaced for r in self.recording.components.get(failed, ()))


def _factor(drawn: float, runs: Sequence[float], standard_error: float, rng: np.random.Generator) -> float:
    """The factor that gives the drawn run the spread of all runs."""
    if drawn <= 0:
        return 1.0
    if len(runs) < 2:
        return math.exp(standard_error / drawn * float(rng.standard_normal()))
    mean = math.fsum(math.log(r) for r in runs) / len(runs)
    distance = math.log(drawn) - mean
    return math.exp((math.sqrt(len(runs) / (len(runs) - 1)) - 1.0) * distance)


def _sum(phases: Sequence[PhaseSeconds]) -> PhaseSeconds:
    """The phases of one trial. Its messages are exchanged once."""
    return PhaseSeconds(
        build=math.fsum(p.build for p in phases),
        warm_up=math.fsum(p.warm_up for p in phases),
        timed=math.fsum(p.timed for p in phases),
        messaging=max((p.messaging for p in phases), default=0.0),
    )
