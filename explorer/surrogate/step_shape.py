"""The seconds of whole steps over sizes, as far as they are known before they are measured.

A step does a part of its work once, and the rest for each sequence. So its seconds grow with its size, each further
sequence adds at least as much as the one before, and a size has hardly more throughput than a larger one that fits. A
Gaussian process knows none of this, so its samples are moved to seconds that keep these rules, as Lin and Dunson (2014,
Biometrika 101) do. Only sizes that were not measured are moved.

Between measured sizes the process itself knows enough. Above them nothing but growth is claimed, because a GPU may need
hardly longer for twice as much.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bexp.explorer.cost.components import Component
from bexp.explorer.cost.composition import Floats, Ints, Mask
from bexp.explorer.surrogate.observations import SHORTEST_SECONDS

FALL = 0.02
"""The most by which the logarithm of the throughput falls in the octave above a size, unless it was seen to fall more.

Of four models composed on an H200, it fell by 0.01 to 0.02 an octave in two, and by up to 0.05 in one. Where the fall
is larger, the next size below is measured all the same, and shows it.
"""


class StepShape:
    """The rules for the columns of whole steps. Steps with other settings are curves of their own."""

    def __init__(self, components: Sequence[Component]) -> None:
        curves: dict[Component, list[int]] = {}
        for column, component in sorted(enumerate(components), key=lambda each: each[1].micro_batch_size):
            if component.micro_batch_size:
                alike = component.model_copy(update={"micro_batch_size": 0})
                curves.setdefault(alike, []).append(column)
        self._curves: list[Ints] = [np.array(columns) for columns in curves.values()]
        self._size_K: Floats = np.array([component.micro_batch_size for component in components], dtype=np.float64)

    def apply(self, log_NK: Floats, known_K: Mask) -> None:
        """Move samples of the logarithm of seconds, of shape (N, K), at sizes that are not `known_K`, in place.

        A curve without a known size begins at the largest that is known of any other.
        """
        largest = self._size_K[known_K].max(initial=0.0)
        for columns in self._curves:
            known = known_K[columns]
            if not known.any():
                known = self._size_K[columns] == largest
            if known.any():
                log_NK[:, columns] = _shaped(log_NK[:, columns], np.log(self._size_K[columns]), known)


def _shaped(log_NS: Floats, log_size_S: Floats, known_S: Mask) -> Floats:
    """Return the samples of one curve, whose sizes ascend, with the rules at each size that is not known."""
    known = np.flatnonzero(known_S)
    shaped_NS = log_NS.copy()
    for place in map(int, np.flatnonzero(~known_S)):
        below, above = known[known < place], known[known > place]
        if below.size:
            shaped_NS[:, place] = np.maximum(shaped_NS[:, place], log_NS[:, below].max(axis=1))
        else:
            shaped_NS[:, place] = _smaller(log_NS, log_size_S, above, place)
        if above.size:
            shaped_NS[:, place] = np.minimum(shaped_NS[:, place], log_NS[:, above].min(axis=1))
    return shaped_NS


def _smaller(log_NS: Floats, log_size_S: Floats, known: Ints, place: int) -> Floats:
    """Return the samples at a size below all that are known: as likely slower by as much as they were too fast."""
    first, size = known[0], log_size_S[place]
    fall_N = np.full(len(log_NS), FALL / np.log(2.0))
    line_N = np.full(len(log_NS), -np.inf)
    if known.size > 1:
        pair = known[:2]
        seconds_N2, (low, high) = np.exp(log_NS[:, pair]), np.exp(log_size_S[pair])
        slope_N = (seconds_N2[:, 1] - seconds_N2[:, 0]) / (high - low)
        line_N = np.log(np.maximum(seconds_N2[:, 0] - slope_N * (low - np.exp(size)), SHORTEST_SECONDS))
        pace_N2 = log_NS[:, pair] - log_size_S[pair]
        fall_N = np.maximum(fall_N, (pace_N2[:, 1] - pace_N2[:, 0]) / (log_size_S[pair[1]] - log_size_S[first]))
    apart = log_size_S[first] - size
    least_N = log_NS[:, first] - apart - fall_N * min(apart, np.log(2.0))
    return np.asarray(np.maximum(least_N + np.abs(log_NS[:, place] - least_N), line_N))
