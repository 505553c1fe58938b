"""The error of composed peaks against those of whole models: its prior, and its posterior given whole models.

The error is the logarithm of a whole model's peak over the composed one. It is the sum of a part that all candidates of
a model share and one of each candidate's own. Both have the same standard deviation, the scale. The scale differs by
orders of magnitude between models. It is learnt from the whole models that were run: its posterior is a sum over a
grid.

A few candidates are far off although the others are not. So the own part of a candidate that was not run whole has
heavy tails: a second normal distribution, whose scale does not shrink with the errors of others.

A candidate that ran out of memory shows a bound that its error exceeds. For other candidates, this is evidence on the
shared part and the scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import ndtr

from bexp.explorer.cost.composition import Floats, Ints
from bexp.explorer.surrogate.whole_model_error import sample_in_blocks

SCALE_MEDIAN = 0.0018
SCALE_LOG_STD = 1.4
"""Median of the scale, and the standard deviation of its logarithm.

In benchmarks/results/h200-fidelity.json, h200-recorded-fidelity.json, h200x4-fidelity.json, h100-real-trainers.json,
h200-explorations.json and h200x4-explorations.json, the root mean square of a model's errors is 0.25% in the median of
30 models, and 4 to 6% for those that devices share.
"""
TAIL_SHARE = 0.05
TAIL_RUNS = 10
TAIL_STD = 0.02
"""The tail: the prior share of candidates in it, the weight of this prior in whole models, and the least standard
deviation of their own parts. The share falls with each whole model that was run.

Peaks of sharded steps on two H100s (benchmarks/results/h100x2-mesh-fidelity.json) are 0.3% off in the median and 4.9%
at most, and those of two compiled candidates on an H200 were 3.8 and 9.0% off.
"""
SCALE_GRID: Floats = 0.0004 * 2.0 ** np.arange(8, dtype=np.float64)
SHARED_STEP = 0.25
SHARED_GRID: Floats = np.arange(-4.0, 4.0 + SHARED_STEP, SHARED_STEP)
"""The grid of the shared part, in deviations, for the sum that bounds need."""


class PeakErrors:
    """Samples of the error of every candidate's composed peak. Axes: N samples, C candidates, A some of them.

    Their draws are made once. `logs` are the errors of the whole models that were run. `exceeded` has bounds for each
    one that ran out of memory: its error exceeds one of them, each with equal probability. Some error of the prior must
    exceed one of them: a candidate that ran out of memory for another reason is no observation of this error.
    """

    def __init__(self, num_candidates: int, num_samples: int, rng: np.random.Generator) -> None:
        self._points_N = rng.permutation((np.arange(num_samples) + 0.5) / num_samples)
        self._shared_N = rng.standard_normal(num_samples)
        self._own_NC = np.asfortranarray(rng.standard_normal((num_samples, num_candidates), dtype=np.float32))
        self._uniform_NC = np.asfortranarray(rng.random((num_samples, num_candidates), dtype=np.float32))

    def sample(self, rows: Ints, number: int, logs: Sequence[float], exceeded: Sequence[Floats] = ()) -> Floats:
        """Return the first `number` samples of the errors of `rows`, none of which was run whole, shape (N, A)."""
        weights_GS = _joint_weights(logs, exceeded) if exceeded else _scale_weights(logs)[:, None]
        cumulative = np.cumsum(weights_GS.sum(axis=1))
        index_N = np.minimum(np.searchsorted(cumulative, self._points_N[:number]), SCALE_GRID.size - 1)
        scale_N = SCALE_GRID[index_N]
        normal_N = self._shared_N[:number]
        if exceeded:
            normal_N = _move_normal(normal_N, index_N, weights_GS)
        shared_N = _shared_mean(logs) + scale_N * _shared_deviations(logs) * normal_N
        in_tail_NA = self._uniform_NC[:number, rows] < _tail_share(len(logs))
        own_NA = np.where(in_tail_NA, np.maximum(scale_N, TAIL_STD)[:, None], scale_N[:, None])
        return np.asarray(shared_N[:, None] + own_NA * self._own_NC[:number, rows])


def probability_below(error_C: Floats, logs: Sequence[float], exceeded: Sequence[Floats] = ()) -> Floats:
    """Return the probability that the error of a candidate that was not run whole is at most `error_C`, shape (C,)."""
    if exceeded:
        shared_GS, weights_GS = _shared_parts(logs), _joint_weights(logs, exceeded)

        def below(rows: Ints) -> Floats:
            distance_AGS = error_C[rows, None, None] - shared_GS
            return np.asarray((_below(distance_AGS, len(logs), SCALE_GRID[:, None]) * weights_GS).sum(axis=(1, 2)))

        return sample_in_blocks(below, np.arange(error_C.size))
    distance_C1, shared_G = error_C[:, None] - _shared_mean(logs), _shared_deviations(logs) * SCALE_GRID
    return np.asarray(_below(distance_C1, len(logs), SCALE_GRID, shared_G) @ _scale_weights(logs))


def _tail_share(number: int) -> float:
    """Return the expected share of candidates in the tail after so many whole models, none of which is in it."""
    return TAIL_SHARE * TAIL_RUNS / (TAIL_RUNS + number)


def _below(distance: Floats, number: int, scale: Floats, shared: Floats | float = 0.0) -> Floats:
    """Return the probability that an own part of this `scale` and the `shared` part's deviation are below a distance.

    `number` whole models were run.
    """
    share = _tail_share(number)
    inner, tail = np.hypot(scale, shared), np.hypot(np.maximum(scale, TAIL_STD), shared)
    return np.asarray((1.0 - share) * ndtr(distance / inner) + share * ndtr(distance / tail))


def _shared_mean(logs: Sequence[float]) -> float:
    """Return the expected shared part, for any scale: it has the same variance as each candidate's own part."""
    return sum(logs) / (1 + len(logs))


def _shared_deviations(logs: Sequence[float]) -> float:
    """Return the posterior standard deviation of the shared part, in scales."""
    return float((1 + len(logs)) ** -0.5)


def _shared_parts(logs: Sequence[float]) -> Floats:
    """Return the shared part at each point of both grids, shape (G, S)."""
    return np.asarray(_shared_mean(logs) + SCALE_GRID[:, None] * _shared_deviations(logs) * SHARED_GRID)


def _joint_weights(logs: Sequence[float], exceeded: Sequence[Floats]) -> Floats:
    """Return the posterior probability of each scale and shared part, shape (G, S).

    Given both, the errors of the candidates that ran out of memory are independent. The weights are kept near 1 by
    powers of two, which change no digit, so that the product over many does not underflow.
    """
    weights_GS = _scale_weights(logs)[:, None] * np.exp(-0.5 * SHARED_GRID**2)
    for bound_Q in exceeded:
        distance_GSQ = _shared_parts(logs)[..., None] - bound_Q
        weights_GS = weights_GS * _below(distance_GSQ, len(logs), SCALE_GRID[:, None, None]).mean(axis=-1)
        most = float(weights_GS.max())
        assert most > 0.0, f"no error exceeds {bound_Q.min():.3g}: something else took the memory"
        weights_GS = np.ldexp(weights_GS, -math.frexp(most)[1])
    return np.asarray(weights_GS / weights_GS.sum())


def _move_normal(normal_N: Floats, index_N: Ints, weights_GS: Floats) -> Floats:
    """Return standard normal draws moved to the distribution of the shared part at their scales, shape (N,)."""
    edges = np.append(SHARED_GRID, SHARED_GRID[-1] + SHARED_STEP) - 0.5 * SHARED_STEP
    moved_N = np.empty_like(normal_N)
    for index in np.unique(index_N):
        cumulative = np.append(0.0, np.cumsum(weights_GS[index]))
        own_N = index_N == index
        moved_N[own_N] = np.interp(ndtr(normal_N[own_N]), cumulative / cumulative[-1], edges)
    return moved_N


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
