"""Answers measurements from a recorded table at once, and adds their recorded seconds to a virtual clock."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from bexp.explorer.cost.components import Component
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.records.measurement import (
    ComponentMeasurement,
    Measurement,
    Outcome,
    PhaseSeconds,
    WholeModelMeasurement,
)
from bexp.explorer.records.trial import TrialKind, TrialTask
from bexp.workers.replay.recording import Recording
from bexp.workers.replay.rows import ComponentRow, WholeModelRow


class VirtualClock:
    """Seconds of recorded trials, added to the seconds of `real` (default: a clock that stands still)."""

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
    of the seed. With R runs, the distance of a run from their mean is widened by sqrt(R / (R - 1)), because a bootstrap
    of few runs underestimates their variance (Efron, 1982). A single run is moved by its standard error. A component
    that was never recorded is `unsupported`.
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
