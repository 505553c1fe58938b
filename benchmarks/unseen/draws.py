"""Numbers that follow from a seed and a name, so that a device answers alike whoever asks in whatever order."""

from __future__ import annotations

import zlib

import numpy as np

MOST_SCALES = 8.0
"""Draws with heavy tails are cut at this many scales."""


class Draws:
    """Hidden numbers of one seed: each name has its own, and always the same."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def generator(self, *name: object) -> np.random.Generator:
        return np.random.default_rng([self._seed, zlib.crc32(":".join(map(str, name)).encode())])

    def normal(self, *name: object) -> float:
        return float(self.generator(*name).standard_normal())

    def heavy(self, *name: object) -> float:
        """Return a number from Student's t distribution with three degrees of freedom, cut at MOST_SCALES."""
        return float(np.clip(self.generator(*name).standard_t(3), -MOST_SCALES, MOST_SCALES))

    def between(self, low: float, high: float, *name: object) -> float:
        return low + (high - low) * float(self.generator(*name).random())

    def scale_between(self, low: float, high: float, *name: object) -> float:
        """Return a number whose logarithm is uniform between those of `low` and `high`."""
        return float(low * (high / low) ** self.between(0.0, 1.0, *name))

    def happens(self, probability: float, *name: object) -> bool:
        """Return whether an event of this probability occurs."""
        return self.between(0.0, 1.0, *name) < probability
