"""Preparation before a component can be timed, to compile it or to start a command, learnt from the trials so far."""

from __future__ import annotations

from typing import overload

import numpy as np

from bexp.explorer.cost.composition import Floats, Mask
from bexp.explorer.records.measurement import Measurement

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

    def of(self, prepared_K: Mask, known_K: Mask) -> Floats:
        """The seconds that each component takes in addition to its own runs, shape (K,);

        0 for those not in `prepared_K`.
        """
        again = 1.0 if self._is_whole else AGAIN_SHARE
        return np.where(prepared_K, self.each * np.where(known_K, again, 1.0), 0.0)


@overload
def worth(seconds: float) -> float: ...
@overload
def worth(seconds: Floats) -> Floats: ...
def worth(seconds: Floats | float) -> Floats | float:
    """Return the gain, in tolerances, that is worth so many seconds of preparation."""
    return seconds / WORTH_SECONDS
