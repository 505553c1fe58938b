"""What the timings of a step say by themselves, without a model of how a step's time follows from its size.

The search interpolates between sizes. If timings scatter, or a step does not scale as blocks of layers do, it can take
a measured difference for noise. Its answer is therefore checked against the timings alone: each size has a speed of its
own, of which nothing is known beforehand. How much two measurements of a size differ beyond their repeats is learnt
from sizes that were measured again; its prior is that of the search (`bexp.explorer.surrogate.hyperparameters`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from bexp.explorer.cost.composition import Floats
from bexp.explorer.search.confidence import confidences
from bexp.explorer.surrogate.hyperparameters import LOG_STD, RUN_GRID, RUN_MEDIAN

NUM_SAMPLES = 4096
FEW_REPEATS_ERROR = 0.1
"""The relative standard error of a measurement with one repeat alone."""


def mean_and_error(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the mean of the repeats and its standard error; an error of a tenth if there is one repeat alone."""
    mean = sum(seconds) / len(seconds)
    if len(seconds) < 2:
        return mean, mean * FEW_REPEATS_ERROR
    variance = sum((each - mean) ** 2 for each in seconds) / (len(seconds) - 1)
    return mean, math.sqrt(variance / len(seconds))


class StepTimings:
    """The posterior of the speed of S sizes, given one or more measurements of each.

    `measurements` holds the seconds of the repeats of each measurement, by size. `overhead_seconds` are those that each
    sequence adds beside them, its share of the optimizer's step.
    """

    def __init__(
        self, device_kind: str, measurements: Mapping[int, Sequence[Sequence[float]]], overhead_seconds: float = 0.0
    ) -> None:
        self.sizes = sorted(measurements)
        self._rates: dict[int, float] = {}
        number, within, squares, logs = [], [], [], []
        for size in self.sizes:
            figures = [mean_and_error(seconds) for seconds in measurements[size]]
            means = np.array([mean + overhead_seconds * size for mean, _ in figures])
            errors = np.array([error for _, error in figures]) / means
            self._rates[size] = size / float(means.mean())
            number.append(float(len(figures)))
            within.append(float(np.mean(errors**2)))
            squares.append(float(((np.log(means) - np.log(means).mean()) ** 2).sum()))
            logs.append(math.log(size) - float(np.log(means).mean()))
        self._within_S = np.array(within)
        run_R = _run_posterior(RUN_MEDIAN[device_kind], np.array(number), self._within_S, np.array(squares))
        self._mean_run = float(run_R @ RUN_GRID)
        rng = np.random.default_rng(0)
        run_N = rng.choice(RUN_GRID, NUM_SAMPLES, p=run_R)
        std_NS = np.sqrt((run_N[:, None] ** 2 + self._within_S) / np.array(number))
        self._logs_NS: Floats = np.array(logs) + std_NS * rng.standard_normal(std_NS.shape)

    @property
    def scatter(self) -> float:
        """The relative standard deviation of a measurement, expected after all that were made."""
        return math.sqrt(self._mean_run**2 + float(self._within_S.mean()))

    def rate(self, size: int) -> float:
        """Return the sequences a second of a size, by the mean seconds of its measurements."""
        return self._rates[size]

    def confidences(self, tolerance: float, among: Collection[int]) -> dict[int, float]:
        """Return, for each size of `among`, the probability that it is within `tolerance` of the best of them, 0..1."""
        kept = [size for size in self.sizes if size in among]
        logs_NA = self._logs_NS[:, [self.sizes.index(size) for size in kept]]
        rates_NA = np.exp(logs_NA)
        return dict(zip(kept, confidences(rates_NA, rates_NA, tolerance).tolist(), strict=True))


def _run_posterior(median: float, number_S: Floats, within_S: Floats, squares_S: Floats) -> Floats:
    """Probability of each value of RUN_GRID, given how measurements of one size scatter around their mean."""
    variance_RS = RUN_GRID[:, None] ** 2 + within_S
    logs = -0.5 * (np.log(RUN_GRID / median) / LOG_STD) ** 2
    logs -= 0.5 * ((number_S - 1) * np.log(variance_RS) + squares_S / variance_RS).sum(axis=1)
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum())
