"""The answers of an unseen device: the truth with its noise."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from benchmarks.unseen.draws import Draws
from benchmarks.unseen.truth import MOST_DRAWS, UnseenTruth
from bexp.explorer.cost.components import Component
from bexp.explorer.records.measurement import (
    ComponentMeasurement,
    Measurement,
    Outcome,
    PhaseSeconds,
    WholeModelMeasurement,
)
from bexp.explorer.records.trial import TrialKind, TrialTask
from bexp.workers.replay.profiler import VirtualClock

COMPILED_AGAIN = 0.4
"""Of what compiling takes, the share that it takes again in another process or model."""


class UnseenDevice:
    """A `Measure` that answers with the truth and its noise.

    Runs differ by 0.3 to 3%, by kind of component. A few are outliers. The device drifts slowly from trial to trial.
    `num_out_of_memory` counts the whole models that did not fit.
    """

    def __init__(self, truth: UnseenTruth, seed: int, clock: VirtualClock) -> None:
        self.num_out_of_memory = 0
        self._truth = truth
        self._clock = clock
        hidden = Draws(MOST_DRAWS * truth.seed)
        self._runs = Draws(seed)
        self._scale = hidden.scale_between(0.003, 0.03, "run scale")
        self._scales = {
            c.kind: float(np.clip(self._scale * hidden.scale_between(0.5, 2.0, "run scale", c.kind), 0.003, 0.03))
            for c in truth.table.components
        }
        self._stated = hidden.between(0.1, 0.5, "stated")
        self._host_scale = hidden.scale_between(0.02, 0.15, "host scale")
        self._drift = hidden.between(0.0, 0.01, "drift")
        self._period = hidden.scale_between(4.0, 60.0, "period")
        self._phase = hidden.between(0.0, 2 * math.pi, "phase")
        self._outliers = hidden.between(0.0, 0.04, "outliers")
        self._compiling_seconds = hidden.scale_between(4.0, 20.0, "compiling")
        self._compiled: set[Component] = set()

    def __call__(self, task: TrialTask) -> Measurement:
        """Answer a plan."""
        whole = task.kind is TrialKind.WHOLE_MODEL
        measurement = self._whole_model(task) if whole else self._components(task)
        self._clock.advance(measurement.phases.total)
        return measurement

    def _components(self, task: TrialTask) -> Measurement:
        measured = tuple(self._component(component, task.number) for component in task.components)
        seconds = [float(self._truth.device_K[self._truth.table.column[m.component]]) for m in measured]
        return Measurement(
            candidate=task.candidate,
            outcome=Outcome.OK,
            components=measured,
            phases=PhaseSeconds(
                build=0.02 * len(seconds),
                warm_up=sum(0.02 + 2.5 * s for s in seconds) + self._compile(task.components),
                timed=sum(0.25 + 9 * s for s in seconds),
                messaging=0.03,
            ),
        )

    def _component(self, component: Component, trial: int) -> ComponentMeasurement:
        truth, runs = self._truth, self._runs
        column, scale = truth.table.column[component], self._scales[component.kind]
        noise = scale * runs.normal("run", component.key, trial) + self._drifted(trial)
        if runs.happens(self._outliers, "outlier", component.key, trial):
            noise += runs.between(0.03, 0.1, "outlier size", component.key, trial)
        device = float(truth.device_K[column]) * math.exp(noise)
        host = float(truth.host_K[column]) * math.exp(self._host_scale * runs.normal("host", component.key, trial))
        saved, forward, backward = (round(float(size)) for size in truth.sizes_3K[:, column])
        return ComponentMeasurement(
            component=component,
            device_seconds=device,
            host_seconds=host,
            forward_device_seconds=device / 3,
            standard_error_seconds=self._stated * scale * device,
            repeats=6,
            saved_bytes=saved,
            forward_peak_bytes=forward,
            backward_peak_bytes=backward,
        )

    def _whole_model(self, task: TrialTask) -> Measurement:
        truth, runs = self._truth, self._runs
        row = truth.table.row[task.candidate]
        true = float(truth.micro_step_C[row])
        warm_up = 2 * true + 0.5 + self._compile(truth.table.decompositions[row].components)
        phases = PhaseSeconds(build=0.5, warm_up=warm_up, timed=6 * true + 0.5, messaging=0.05)
        if not truth.lasts_C[row]:
            self.num_out_of_memory += 1
            return Measurement(candidate=task.candidate, outcome=Outcome.OUT_OF_MEMORY, phases=phases)
        # Its blocks' noise averages out in part, because they differ by themselves.
        noise = 0.4 * self._scale * runs.normal("whole", task.candidate.describe(), task.number)
        seconds = true * math.exp(noise + self._drifted(task.number))
        peak = round(float(truth.peak_C[row]))
        return Measurement(
            candidate=task.candidate,
            outcome=Outcome.OK,
            whole_model=WholeModelMeasurement(
                micro_step_seconds=seconds,
                optimizer_seconds=float(truth.optimizer_C[row]),
                standard_error_seconds=0.3 * 0.4 * self._scale * seconds,
                peak_bytes=peak,
                reserved_bytes=round(1.01 * peak),
                repeats=5,
            ),
            phases=phases,
        )

    def _compile(self, components: Sequence[Component]) -> float:
        """Return the seconds that the compiler takes; what it has compiled before takes less."""
        compiled = [component for component in components if component.is_compiled]
        again = self._compiled.intersection(compiled)
        self._compiled.update(compiled)
        return self._compiling_seconds * (len(compiled) - (1.0 - COMPILED_AGAIN) * len(again))

    def _drifted(self, trial: int) -> float:
        return self._drift * math.sin(2 * math.pi * trial / self._period + self._phase)
