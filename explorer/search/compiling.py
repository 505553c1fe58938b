"""What it takes to compile a component before it can be timed, learnt from those that were compiled."""

from __future__ import annotations

from typing import overload

import numpy as np

from bexp.explorer.cost_model.composition import Floats, Mask
from bexp.explorer.records.measurement import Measurement

ASSUMED_SECONDS = {"cuda": 10.0, "cpu": 6.0}
"""Seconds to compile one component until one was compiled here. It counts as much as one that was."""
AGAIN_SHARE = 0.4
"""The share of these seconds that a component takes that was compiled before: its kernels are there already."""


WORTH_SECONDS = 100.0
"""So long may be compiled for an expected gain of one tolerance, and for a share of it no longer than that share."""


class CompilingSeconds:
    """The mean warm-up of the compiled components so far, trial by trial."""

    def __init__(self, device_kind: str) -> None:
        self._assumed = ASSUMED_SECONDS[device_kind]
        self._by_trial: dict[int, tuple[float, int]] = {}

    def learn(self, number: int, measurement: Measurement) -> None:
        """Learn what trial `number` took to warm up, if it compiled anything."""
        compiled = sum(each.component.is_compiled for each in measurement.components)
        if compiled:
            self._by_trial[number] = (measurement.phases.warm_up, compiled)

    @property
    def each(self) -> float:
        """The seconds that one component is expected to take."""
        seconds = self._assumed + sum(seconds for seconds, _ in self._by_trial.values())
        return seconds / (1 + sum(number for _, number in self._by_trial.values()))

    def of(self, compiled_K: Mask, known_K: Mask) -> Floats:
        """The seconds that each component takes beside its own runs, shape (K,)."""
        return np.where(compiled_K, self.each * np.where(known_K, AGAIN_SHARE, 1.0), 0.0)


@overload
def worth(seconds: float) -> float: ...
@overload
def worth(seconds: Floats) -> Floats: ...
def worth(seconds: Floats | float) -> Floats | float:
    """Return the gain, in tolerances, that is worth so many seconds of the compiler."""
    return seconds / WORTH_SECONDS
