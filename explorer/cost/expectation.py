"""The mean seconds of a micro-step over all data, from the seconds of a few whose work is known."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

LEAST_ERROR = 1e-3
"""The least standard error, as a share of the mean: a few equal seconds do not prove that there is no noise."""

Figures = NDArray[np.float64]


def expect(work: Figures, seconds: Figures, is_drawn: NDArray[np.bool_], population: Figures) -> tuple[float, float]:
    """Return the mean seconds over the micro-batches of a `population`, and the standard error of this mean.

    Each row of `work` is one timed micro-step, with amounts to which seconds may be proportional. `population` has the
    same columns. A micro-step that `is_drawn` stands for the population. Any other only shows the slope. The mean is
    that of the drawn ones, plus the slope times the difference of the population's mean work from theirs. So it is
    right for drawn ones that resemble the population, even where seconds are no linear function of work. No factor of
    the slope is negative. Of the amounts, those are used that leave the least variance.
    """
    scale = np.maximum(population.mean(axis=0), 1e-30)
    columns = np.column_stack([np.ones(len(work)), work / scale])
    wanted = np.append(1.0, population.mean(axis=0) / scale)
    noise = columns[:, :2].sum(axis=1)  # a part of it is the same in each micro-step, and a part grows with the work
    best: tuple[float, NDArray[np.intp]] | None = None
    for chosen in _subsets(columns.shape[1]):
        design = columns[:, chosen] / noise[:, None]
        factors, _, rank, _ = np.linalg.lstsq(design, seconds / noise, rcond=None)
        freedom = len(seconds) - len(chosen)
        if rank < len(chosen) or freedom < 1 or (factors < 0).any():
            continue
        variance = float(np.square(seconds / noise - design @ factors).sum()) / freedom
        if best is None or variance < best[0]:
            best = variance, chosen
    assert best is not None, "a constant alone always fits"
    variance, chosen = best
    drawn = is_drawn / is_drawn.sum()
    lack = wanted[chosen] - drawn @ columns[:, chosen]
    slope = np.linalg.pinv(columns[:, chosen] / noise[:, None]).T @ lack / noise
    weights = drawn + slope  # the mean is linear in the seconds
    mean = max(0.0, float(weights @ seconds))
    return mean, max(float(np.sqrt(variance * np.square(weights * noise).sum())), LEAST_ERROR * mean)


def _subsets(number: int) -> list[NDArray[np.intp]]:
    return [np.array(chosen) for count in range(1, number + 1) for chosen in combinations(range(number), count)]
