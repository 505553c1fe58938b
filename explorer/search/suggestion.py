"""A suggestion: the candidate and its components to measure, the reason, and the time that it and its set-up take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import overload

import numpy as np

from bexp.explorer.cost.components import Component
from bexp.explorer.cost.composition import Composition, Floats, Mask
from bexp.explorer.records.measurement import Measurement
from bexp.explorer.surrogate.gaussian_process import Surrogate

TRIAL_OVERHEAD_SECONDS = 0.15
"""Seconds to build and warm up one component."""
TIMED_PASSES = 8
"""Forward and backward passes that one measurement of a component takes, warm-up included."""

WHOLE_OVERHEAD_SECONDS = 2.0
"""Seconds to build a whole model, and what its quickest steps take."""
MICRO_STEPS, WHOLE_MICRO_STEPS = 2, 7
"""Micro-steps of a step of a whole model, and of all its steps, warm-up included."""
LONG_STEP_SECONDS = {"cuda": 5.0, "cpu": 2.0}
LONG_MICRO_STEPS = 5
"""A longer step is timed once, so that there are fewer micro-steps."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A row of the table, the components of it to measure, and the reason in words.

    `again` says that all of the components were measured before.
    """

    row: int
    components: tuple[Component, ...]
    again: bool = False
    reason: str = ""


def measuring_seconds(seconds_K: Floats) -> Floats:
    """Seconds that it takes to measure components whose single pass takes `seconds_K`."""
    return np.asarray(TRIAL_OVERHEAD_SECONDS + TIMED_PASSES * seconds_K)


def whole_model_seconds(micro_step_seconds: float, device_kind: str) -> float:
    """Seconds that it takes to run a whole model whose micro-step takes `micro_step_seconds`."""
    is_long = MICRO_STEPS * micro_step_seconds > LONG_STEP_SECONDS[device_kind]
    number = LONG_MICRO_STEPS if is_long else WHOLE_MICRO_STEPS
    return WHOLE_OVERHEAD_SECONDS + number * micro_step_seconds


def split_suggestion(
    suggestion: Suggestion, most: int, table: Composition, surrogate: Surrogate
) -> tuple[Suggestion, ...]:
    """Split a suggestion into at most `most` parts that take about equally long.

    The longest component goes to the shortest part first (longest processing time first; Graham, 1969). Each part keeps
    its components in their order.
    """
    if most <= 1 or len(suggestion.components) <= 1:
        return (suggestion,)
    columns = [table.column[c] for c in suggestion.components]
    costs = measuring_seconds(surrogate.device_mean_K[columns])
    parts: list[list[int]] = [[] for _ in range(min(most, len(columns)))]
    loads = [0.0] * len(parts)
    for i in np.argsort(-costs, kind="stable"):
        shortest = loads.index(min(loads))
        parts[shortest].append(int(i))
        loads[shortest] += float(costs[i])
    return tuple(
        replace(suggestion, components=tuple(suggestion.components[i] for i in sorted(part))) for part in parts
    )


ASSUMED_SECONDS = {"cuda": 10.0, "cpu": 6.0}
"""Seconds to compile one component until one was compiled here. It counts as much as one that was."""
AGAIN_SHARE = 0.4
"""The share of these seconds that a component takes that was compiled before: its kernels are there already."""


WORTH_SECONDS = 100.0
"""So long may be prepared for an expected gain of one tolerance, and for a share of it no longer than that share."""


class PreparingSeconds:
    """The mean preparation of the components so far, trial by trial.

    For a model that `is_whole`, such as a training command, the trials count that had to build it, or to start it. For
    any other, the components count that are compiled.
    """

    def __init__(self, device_kind: str, *, is_whole: bool = False) -> None:
        self._is_whole = is_whole
        self._assumed = 0.0 if is_whole else ASSUMED_SECONDS[device_kind]
        self._by_trial: dict[int, tuple[float, int]] = {}

    def learn(self, number: int, measurement: Measurement) -> None:
        """Learn the seconds of trial `number` before it timed anything, if something was prepared."""
        if self._is_whole:
            if measurement.components:
                self._by_trial[number] = (measurement.phases.build, 1)
            return
        compiled = sum(each.component.is_compiled for each in measurement.components)
        if compiled:
            self._by_trial[number] = (measurement.phases.warm_up, compiled)

    @property
    def each(self) -> float:
        """The seconds that one component is expected to take."""
        seconds = self._assumed + sum(seconds for seconds, _ in self._by_trial.values())
        number = (not self._is_whole) + sum(number for _, number in self._by_trial.values())
        return seconds / max(1, number)

    @property
    def measured(self) -> float:
        """The mean seconds of those that were prepared here; 0 without any."""
        trials = self._by_trial.values()
        return sum(seconds for seconds, _ in trials) / max(1, sum(number for _, number in trials))

    def of(self, prepared_K: Mask, known_K: Mask) -> Floats:
        """The seconds that each component takes before its own runs, shape (K,); 0 for those not in `prepared_K`."""
        again = 1.0 if self._is_whole else AGAIN_SHARE
        return np.where(prepared_K, self.each * np.where(known_K, again, 1.0), 0.0)


@overload
def worth(seconds: float) -> float: ...
@overload
def worth(seconds: Floats) -> Floats: ...
def worth(seconds: Floats | float) -> Floats | float:
    """Return the gain, in tolerances, that is worth so many seconds of preparation."""
    return seconds / WORTH_SECONDS
