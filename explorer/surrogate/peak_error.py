"""The error of composed peaks against those of whole models: its prior, and its posterior given whole models.

The error is the logarithm of a whole model's peak over the composed one. It is the sum of a part that all candidates of
a model share and one of each candidate's own. Both have the same standard deviation, the scale. It differs by orders of
magnitude between models, and is learnt from the whole models that were run: its posterior is a sum over a grid.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.special import ndtr

from explorer.cost_model.candidate_table import Floats, Ints

SCALE_MEDIAN = 0.0018
SCALE_LOG_STD = 1.4
"""Median of the scale, and the standard deviation of its logarithm.

In benchmarks/results/h200-fidelity.json, h200-recorded-fidelity.json, h200x4-fidelity.json, h100-real-trainers.json,
h200-explorations.json and h200x4-explorations.json, the root mean square of a model's errors is 0.25% in the median of
30 models, and 4 to 6% for those that devices share.
"""
SCALE_GRID: Floats = 0.0004 * 2.0 ** np.arange(8, dtype=np.float64)


class PeakErrors:
    """Samples of the error of every candidate's composed peak. Axes: N samples, C candidates, A some of them.

    The draws behind them are made once. `logs` are the errors of the whole models that were run.
    """

    def __init__(self, num_candidates: int, num_samples: int, rng: np.random.Generator) -> None:
        self._points_N = rng.permutation((np.arange(num_samples) + 0.5) / num_samples)
        self._shared_N = rng.standard_normal(num_samples)
        self._own_NC = np.asfortranarray(rng.standard_normal((num_samples, num_candidates), dtype=np.float32))

    def sample(self, rows: Ints, number: int, logs: Sequence[float]) -> Floats:
        """Return the first `number` samples of the errors of `rows`, none of which was run whole, shape (N, A)."""
        cumulative = np.cumsum(_scale_weights(logs))
        index_N = np.minimum(np.searchsorted(cumulative, self._points_N[:number]), SCALE_GRID.size - 1)
        scale_N = SCALE_GRID[index_N]
        shared_N = _shared_mean(logs) + scale_N * _shared_deviations(logs) * self._shared_N[:number]
        return np.asarray(shared_N[:, None] + scale_N[:, None] * self._own_NC[:number, rows])


def probability_below(error_C: Floats, logs: Sequence[float]) -> Floats:
    """Return the probability that the error of a candidate that was not run whole is at most `error_C`, shape (C,)."""
    deviations = np.hypot(1.0, _shared_deviations(logs)) * SCALE_GRID
    return np.asarray(ndtr((error_C[:, None] - _shared_mean(logs)) / deviations) @ _scale_weights(logs))


def _shared_mean(logs: Sequence[float]) -> float:
    """Return the expected shared part, whatever the scale: its own variance is that of each error around it."""
    return sum(logs) / (1 + len(logs))


def _shared_deviations(logs: Sequence[float]) -> float:
    """Return the posterior standard deviation of the shared part, in scales."""
    return float((1 + len(logs)) ** -0.5)


def _scale_weights(logs: Sequence[float]) -> Floats:
    """Return the posterior probability of each scale of the grid, given errors that are shared and own in equal parts.

    Their covariance is scale^2 (I + 11'), whose inverse and determinant are closed (Sherman and Morrison, 1950).
    """
    number = len(logs)
    squares = sum(each * each for each in logs) - sum(logs) ** 2 / (1 + number)
    log_weights = -0.5 * (np.log(SCALE_GRID / SCALE_MEDIAN) / SCALE_LOG_STD) ** 2
    log_weights -= number * np.log(SCALE_GRID) + 0.5 * squares / SCALE_GRID**2
    weights = np.exp(log_weights - log_weights.max())
    return np.asarray(weights / weights.sum())
