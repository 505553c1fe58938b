"""The runs of each component, one or several. Runs of earlier explorations count less with age."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bexp.explorer.cost.components import Component
from bexp.explorer.records.device_report import EarlierRun
from bexp.explorer.records.measurement import ComponentMeasurement

SHORTEST_SECONDS = 1e-9  # the least that a clock can show
SECONDS_A_DAY = 86_400.0
BETWEEN_JOBS_STD = {"cuda": 0.004, "cpu": 0.03}
"""Relative standard deviation between explorations, beyond that between two runs of one process.

It has several causes: another process, other clocks and other temperatures. On one H200, 44 components that two or
three jobs measured differ by 0.6% in the median (`bexp.explorer.surrogate.hyperparameters`).
"""
DAILY_STD = {"cuda": 0.002, "cpu": 0.01}
"""The relative standard deviation that one day adds; it grows with the square root of the age. It is assumed."""


def age_run(run: EarlierRun, device_kind: str) -> ComponentMeasurement:
    """Return the measurement of an earlier run with a standard error that is widened by its age."""
    measurement = run.measurement
    drift = DAILY_STD[device_kind] * math.sqrt(run.age_seconds / SECONDS_A_DAY)
    added = math.hypot(BETWEEN_JOBS_STD[device_kind], drift) * measurement.device_seconds
    return measurement.model_copy(
        update={"standard_error_seconds": math.hypot(measurement.standard_error_seconds, added)}
    )


@dataclass(frozen=True)
class ComponentObservations:
    """Runs of a component in the order of their trials, at least one."""

    runs: tuple[ComponentMeasurement, ...]

    @property
    def component(self) -> Component:
        """The component that was run."""
        return self.runs[0].component

    @property
    def first(self) -> ComponentMeasurement:
        """The first run."""
        return self.runs[0]

    @property
    def new_width_seconds(self) -> float | None:
        """The additional seconds when a process first runs rows of a width; None if no run measured them."""
        return min((run.new_width_seconds for run in self.runs if run.new_width_seconds is not None), default=None)

    @cached_property
    def log_seconds(self) -> float:
        """Mean of the logarithms of the runs' device seconds."""
        return float(np.mean(self._logs))

    @cached_property
    def squared_deviations(self) -> float:
        """Sum of the squares of the logarithms' distances from their mean."""
        return float(((self._logs - self.log_seconds) ** 2).sum())

    @cached_property
    def variance_within(self) -> float:
        """Mean over the runs of the square of the relative standard error that each states."""
        errors = [r.standard_error_seconds / max(r.device_seconds, SHORTEST_SECONDS) for r in self.runs]
        return float(np.mean(np.square(errors)))

    @cached_property
    def host_seconds(self) -> float:
        """Geometric mean of the runs' host seconds."""
        return float(np.exp(np.mean([np.log(max(r.host_seconds, SHORTEST_SECONDS)) for r in self.runs])))

    @cached_property
    def forward_share(self) -> float:
        """Mean share of the forward pass in the device seconds."""
        return float(np.mean([r.forward_device_seconds / max(r.device_seconds, SHORTEST_SECONDS) for r in self.runs]))

    @cached_property
    def slowdown(self) -> float | None:
        """Mean slowdown of computation during communication; None for other components."""
        slowdowns = [r.slowdown for r in self.runs if r.slowdown is not None]
        return float(np.mean(slowdowns)) if slowdowns else None

    @cached_property
    def host_overhead(self) -> tuple[float, float]:
        """Mean host seconds of communication in each micro-step, and in addition once a step; 0 for anything else."""
        overheads = [(r.host_seconds, r.host_once_seconds) for r in self.runs if r.host_once_seconds is not None]
        if not overheads:
            return 0.0, 0.0
        each, once = (float(np.mean(seconds)) for seconds in zip(*overheads, strict=True))
        return each, once

    @property
    def waits(self) -> bool:
        """Whether host and device seconds are the same: the block waits for the device, or the host is the device."""
        return all(r.host_seconds == r.device_seconds for r in self.runs)

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        """Saved, forward-peak and backward-peak bytes, each the most of any run."""
        return (
            max(r.saved_bytes for r in self.runs),
            max(r.forward_peak_bytes for r in self.runs),
            max(r.backward_peak_bytes for r in self.runs),
        )

    @cached_property
    def _logs(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.log([max(r.device_seconds, SHORTEST_SECONDS) for r in self.runs])


class ObservationLog:
    """The runs of every component, by trial, so that a trial that is read twice counts once.

    Contaminated runs are counted and not kept. The `earlier` runs of a component, which other explorations made, count
    until it is measured by a trial. `version` grows with every run that is new or dropped.
    """

    def __init__(self, earlier: Sequence[ComponentMeasurement] = ()) -> None:
        self._by_trial: dict[Component, dict[int, ComponentMeasurement]] = {}
        self._contaminated: dict[Component, set[int]] = {}
        grouped: dict[Component, tuple[ComponentMeasurement, ...]] = {}
        for measurement in earlier:
            grouped[measurement.component] = (*grouped.get(measurement.component, ()), measurement)
        self._runs = {component: ComponentObservations(runs) for component, runs in grouped.items()}
        self.version = len(grouped)

    @property
    def earlier(self) -> dict[Component, ComponentObservations]:
        """The runs of other explorations that count."""
        return {component: runs for component, runs in self._runs.items() if component not in self._by_trial}

    def drop_earlier(self) -> None:
        """Forget the runs of other explorations."""
        self._runs = {component: runs for component, runs in self._runs.items() if component in self._by_trial}
        self.version += 1

    def add(self, trial: int, measurements: Sequence[ComponentMeasurement]) -> None:
        """Keep the measurements of trial number `trial`."""
        for measurement in measurements:
            if measurement.contamination is not None:
                self._contaminated.setdefault(measurement.component, set()).add(trial)
                continue
            trials = self._by_trial.setdefault(measurement.component, {})
            if trial not in trials:
                trials[trial] = measurement
                runs = tuple(trials[number] for number in sorted(trials))
                self._runs[measurement.component] = ComponentObservations(runs)
                self.version += 1

    @property
    def runs(self) -> dict[Component, ComponentObservations]:
        """The runs of each component that was measured."""
        return self._runs

    def count(self, component: Component) -> int:
        """Return how often a component was measured, without contaminated runs."""
        observed = self._runs.get(component)
        return len(observed.runs) if observed else 0

    def count_own(self, component: Component) -> int:
        """Return how often this exploration itself measured a component, without contaminated runs."""
        return len(self._by_trial.get(component, ()))

    def count_contaminated(self, component: Component) -> int:
        """Return how many runs of a component were contaminated."""
        return len(self._contaminated.get(component, ()))

    def count_attempts(self, component: Component) -> int:
        """Return how often a component was run, contaminated or not."""
        return self.count(component) + self.count_contaminated(component)

    @property
    def num_contaminated(self) -> int:
        """Contaminated runs of all components."""
        return sum(map(len, self._contaminated.values()))
