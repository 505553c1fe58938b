"""The noise of a device and the roughness of its curves, learnt from the measurements of the job itself.

Three log-space standard deviations are not known beforehand for a kind of component:

- `run`: the difference between two runs of one component, beyond the standard error that each states. It is near a
  value that all kinds on a device share.
- `own`: the deviation of a component from a smooth curve over sizes.
- `amplitude`: the height of that curve.

Their posterior is the prior times the marginal likelihood of the measurements (type-II likelihood; MacKay, 1992;
Rasmussen and Williams, 2006, chapter 5). It is summed over a grid, because with few measurements the maximum is far too
sure. Repeated runs separate `run` from `own`; without them only the sum of both shows.

The priors are log-normal, wide, and rest on recorded data. On one H200, 44 components that were measured in two or
three jobs (benchmarks/results/h200-*.json) differ by 0.6% in the median (scaled to a standard deviation), FFN blocks by
2%; distances from a smooth curve are 0.4% (attention, head) to 3% (FFN). On two shared CPU cores, runs of a component
minutes apart differ by 5% in the median, from 0.6 to 30%.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bexp.explorer.cost.composition import Floats, Ints, Mask
from bexp.explorer.surrogate.covariance import Covariance
from bexp.explorer.surrogate.observations import ComponentObservations

RUN_MEDIAN = {"cuda": 0.006, "cpu": 0.05}
OWN_MEDIAN = {"cuda": 0.01, "cpu": 0.02}
LOG_STD = 1.0
RUN_GRID: Floats = 0.001 * 2.0 ** np.arange(10, dtype=np.float64)
OWN_GRID: Floats = 0.002 * 2.0 ** np.arange(7, dtype=np.float64)
AMPLITUDE_GRID: Floats = np.array([0.005, 0.02, 0.08, 0.32])  # each as likely as the others
OUTLIER_STD = 0.05
OUTLIER_SHARE = 0.02
"""The standard deviation of an outlier, and the share of runs that are outliers.

Noise has heavy tails: in benchmarks/results/tables, runs of attention and FFN blocks differ by 0.3 and 1.2% in the
median and by 1.4 and 3.3% in the root mean square.
"""
LEAST_SUSPICION = 0.05
"""A run with a lower probability to be an outlier counts as none, so that most samples share a covariance."""
KIND_SHIFTS = np.array([-2, -1, 0, 1, 2])
KIND_SHIFT_STD = 1.0
"""Steps of RUN_GRID by which a kind's `run` may differ from the device's. On the H200, kinds differ by 2 to 4 times."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence of the runs of L components of one kind: mean distances from the roofline, and their scatter."""

    covariance: Covariance
    distance_L: Floats  # noqa: N815 - axes are in names
    number_L: Floats  # noqa: N815 - axes are in names
    within_L: Floats  # noqa: N815 - axes are in names
    squares_L: Floats  # noqa: N815 - axes are in names

    @classmethod
    def of(cls, covariance: Covariance, runs: Sequence[ComponentObservations], log_prior_L: Floats) -> Evidence:
        """Return the evidence of runs of the components of `covariance`, in its order, with their log roofline."""
        return cls(
            covariance,
            np.array([r.log_seconds for r in runs]) - log_prior_L,
            np.array([float(len(r.runs)) for r in runs]),
            np.array([r.variance_within for r in runs]),
            np.array([r.squared_deviations for r in runs]),
        )

    def noise(self, run: Floats, outlier: Floats | Mask | float = 0.0) -> Floats:
        """Return the variances of the mean distances for each value of `run`, shape (*run.shape, L).

        `outlier`, of the same shape, is 1 where a run counts as an outlier.
        """
        return np.asarray((run[..., None] ** 2 + self.within_L + OUTLIER_STD**2 * outlier) / self.number_L)

    def gram(self, run: Floats, own: Floats, amplitude: Floats, outlier: Floats | float = 0.0) -> Floats:
        """Return the covariances of the mean distances, shape (..., L, L)."""
        diagonal = self.noise(run, outlier) + own[..., None] ** 2
        eye = np.eye(len(self.distance_L))
        smooth = self.covariance.level + amplitude[..., None, None] ** 2 * self.covariance.curve
        return np.asarray(smooth + diagonal[..., None] * eye)

    def outlier_probability(self, run: Floats, own: Floats, amplitude: Floats) -> Floats:
        """Return the probability that a run of each component was an outlier, shape (L,), for given hyperparameters.

        All other components predict each one (leave-one-out; Rasmussen and Williams, 2006, equations 5.10 to 5.12).
        The odds are the likelihood ratio of its distance with and without an outlier, times the prior odds. The
        probability is 0 below LEAST_SUSPICION.
        """
        inverse = np.linalg.inv(self.gram(run, own, amplitude))
        variance = 1.0 / np.diagonal(inverse)
        squared = (inverse @ self.distance_L * variance) ** 2
        wide = variance + OUTLIER_STD**2 / self.number_L
        logs = 0.5 * (np.log(variance / wide) + squared / variance - squared / wide)
        rare = np.log(OUTLIER_SHARE * self.number_L)
        probability = 1.0 / (1.0 + np.exp(-np.clip(logs + rare, -50.0, 50.0)))
        return np.asarray(np.where(probability < LEAST_SUSPICION, 0.0, probability))

    def log_likelihood(self) -> Floats:
        """Return the log-likelihood of every combination of hyperparameters, shape (runs, owns, amplitudes)."""
        run, own, amplitude = np.meshgrid(RUN_GRID, OWN_GRID, AMPLITUDE_GRID, indexing="ij")
        gram = self.gram(run, own, amplitude)
        factor = np.linalg.cholesky(gram)
        white = np.linalg.solve(gram, np.broadcast_to(self.distance_L, run.shape + self.distance_L.shape)[..., None])
        density = -0.5 * (white[..., 0] @ self.distance_L)
        density -= np.log(np.diagonal(factor, axis1=-2, axis2=-1)).sum(axis=-1)
        single = RUN_GRID[:, None] ** 2 + self.within_L
        scatter = -0.5 * ((self.number_L - 1) * np.log(single) + self.squares_L / single).sum(axis=1)
        return np.asarray(density + scatter[:, None, None])


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Hyperparameters of one kind of component for each of N posterior samples."""

    run_N: Floats  # noqa: N815 - axes are in names
    own_N: Floats  # noqa: N815 - axes are in names
    amplitude_N: Floats  # noqa: N815 - axes are in names


class HyperparameterPosterior:
    """Draws hyperparameters by inverting their distribution at fixed points, so a refit moves them little."""

    def __init__(self, device_kind: str, kinds: Sequence[str], num_samples: int, rng: np.random.Generator) -> None:
        strata = (np.arange(num_samples) + 0.5) / num_samples
        self._device_points_N = rng.permutation(strata)
        self._points_N = {kind: rng.permutation(strata) for kind in kinds}
        self._device_prior = _log_normal(RUN_GRID, RUN_MEDIAN[device_kind])
        shift = -0.5 * (KIND_SHIFTS / KIND_SHIFT_STD) ** 2
        shift -= _log_sum(shift)
        own = _log_normal(OWN_GRID, OWN_MEDIAN[device_kind])
        self._prior = shift[:, None, None] + own[:, None] - np.log(np.full(AMPLITUDE_GRID.size, AMPLITUDE_GRID.size))
        self._run_index = np.clip(np.arange(RUN_GRID.size)[:, None] + KIND_SHIFTS, 0, RUN_GRID.size - 1)
        self._seen: dict[str, tuple[Evidence, Floats]] = {}

    def draw(self, evidence: Mapping[str, Evidence]) -> dict[str, Hyperparameters]:
        """Return hyperparameters of every kind for every sample; kinds without measurements follow their prior."""
        joint = {kind: self._prior + self._likelihood(kind, evidence.get(kind)) for kind in self._points_N}
        flat = {kind: table.reshape(RUN_GRID.size, -1) for kind, table in joint.items()}
        device_log = self._device_prior + sum(_log_sum(table) for table in flat.values())
        device_N = _invert(np.exp(device_log - _log_sum(device_log)), self._device_points_N)
        drawn = {}
        for kind, table in flat.items():
            share = np.exp(table - _log_sum(table)[:, None])
            cell_N = np.zeros(len(device_N), dtype=np.int64)
            for value in np.unique(device_N):
                members = device_N == value
                cell_N[members] = _invert(share[value], self._points_N[kind][members])
            shift_N, own_N, amplitude_N = np.unravel_index(cell_N, self._prior.shape)
            run_N = self._run_index[device_N, shift_N]
            drawn[kind] = Hyperparameters(RUN_GRID[run_N], OWN_GRID[own_N], AMPLITUDE_GRID[amplitude_N])
        return drawn

    def _likelihood(self, kind: str, evidence: Evidence | None) -> Floats:
        """Return the log-likelihood by the device's `run`, the kind's shift of it, `own` and `amplitude`."""
        if evidence is None:
            return np.zeros((RUN_GRID.size, *self._prior.shape))
        if kind not in self._seen or self._seen[kind][0] is not evidence:
            self._seen[kind] = (evidence, evidence.log_likelihood()[self._run_index])
        return self._seen[kind][1]


def _log_normal(grid: Floats, median: float) -> Floats:
    logs = -0.5 * (np.log(grid / median) / LOG_STD) ** 2
    return np.asarray(logs - _log_sum(logs))


def _log_sum(logs: Floats) -> Floats:
    """Return the logarithm of the sum of exponentials over the last axis."""
    highest = logs.max(axis=-1)
    return np.asarray(highest + np.log(np.exp(logs - highest[..., None]).sum(axis=-1)))


def _invert(probabilities: Floats, points: Floats) -> Ints:
    """Return the index of the outcome at each point of the cumulative distribution."""
    cumulative = np.cumsum(probabilities)
    return np.asarray(np.minimum(np.searchsorted(cumulative, points * cumulative[-1]), len(probabilities) - 1))
