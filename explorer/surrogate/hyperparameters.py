"""The prior covariance of components, the noise of a device and the roughness of its curves.

A distance of a component from the roofline is the logarithm of real over roofline seconds. For components of one kind
it is a sum of independent parts:

- an offset of the kind, one of the back end, and one of each recomputation mode, at any size; the back end of a whole
  layer has one for its attention, one for its experts, and hardly any of the two together;
- if layers are of several kinds, an offset of each, and one of each with its back end: a sliding window may take 1.5
  times as long as full attention, or a fraction of it;
- the share that a fixed cost (launches, tails, small tiles) has in a block of n sequences, log(1 + r / n), for a few r,
  most of which all back ends have in common, because only a part of a block's kernels is the back end's;
- in a model that is measured whole, wide shares of larger fixed costs, because the step includes the host's seconds;
- a smooth curve over the number of sequences that a kernel sees at once, of unknown amplitude;
- if small operations are fused, by the compiler or by liger's kernels, an offset of all such components, one of the way
  of fusing, one of the back end, and fixed costs of their own;
- if devices share sequences, an offset of the layout and the number of devices, and another curve of the same
  amplitude, because such a block waits for traffic and merges partial results;
- a part that is specific to each component (wave quantisation, an algorithm chosen for one size), of unknown size.

Widths are log-space standard deviations, lengths are octaves. They rest on 167 component times of four models on an
H200, embeddings left out (benchmarks/results/h200-explorations.json and h200-olmoe-fused.json). Among ninety
combinations, these are within a few units of the highest marginal likelihood with the hyperparameters summed out.
The widths of whole layers and of fused code rest on 93 more times of four models of the library on an H100
(benchmarks/results/h100-default-explorations.json).

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

from bexp.explorer.cost.components import BackEnd, Component, ComponentKind
from bexp.explorer.cost.composition import Floats, Ints, Mask
from bexp.explorer.surrogate.observations import ComponentObservations

KIND_STD = 0.7
BACKEND_STD = 0.35
LAYER_ATTENTION_STD, LAYER_EXPERTS_STD = 0.1, 0.25
PART_STD, PART_BACKEND_STD, PART_ALIKE = 0.3, 0.2, 0.9
"""What a kind of layer, and a back end of it, have of their own; the correlation between curves of two kinds. They are
wide rather than fitted, and were checked with Gemma 3's layers on an H200 alone."""
TOGETHER_STD = 0.01  # the joint part of attention and experts of a layer, in addition to the part of each
MODE_STD = 0.04
MODE_LENGTH = 4.0
SHARING_STD = 0.3
FIXED_COSTS = {0.1: 0.3, 0.5: 0.3, 3.0: 0.1}  # a fixed cost in sequences of work: the width of its share
WHOLE_FIXED = {3.0: 1.0, 30.0: 1.0}
"""The additional fixed costs of a whole step. GPT-2 in a plain loop on an H100 ran 5.8 times as fast at 16 sequences
as at one."""
BACKEND_FIXED = 0.5  # the width of a back end's own fixed costs, over that of those in common
CURVE_LENGTH = 2.0
FUSED_STD = 0.35  # what fused operations gain, which all components of a kind have in common
FUSED_OWN_STD = 0.06  # what one way to fuse them gains over another
FUSED_BACKEND_STD = 0.04
FUSED_FIXED = 0.2  # the width of fused code's own fixed costs, over that of those in common
FUSED_ALIKE = 0.9  # the correlation between the curves of code that is fused in different ways, or not at all


@dataclass(frozen=True, slots=True)
class Covariance:
    """The covariance of K components, `level + amplitude^2 curve + own^2 identity`, for any hyperparameters."""

    level: Floats
    curve: Floats

    @classmethod
    def of(cls, components: Sequence[Component], *, is_whole: bool = False) -> Covariance:
        """Return the covariance of components of one kind, or of whole steps."""
        backends = [c.backend or BackEnd() for c in components]
        backend, alike_fused = _equal([b.unmarked for b in backends]), _equal([b.marks for b in backends])
        fused = np.array([c.is_fused for c in components], dtype=np.float64)
        mode = _equal([(c.recompute, c.bta_tile is not None) for c in components])
        size = np.array([c.context_parallel_size for c in components], dtype=np.float64)
        at_once = np.array([max(c.bta_tile or c.micro_batch_size, 1) for c in components], dtype=np.float64) / size
        batch = np.array([max(c.micro_batch_size, 1) for c in components], dtype=np.float64) / size
        sharings = [(c.context_parallel_layout, c.context_parallel_size if c.communicates else 1) for c in components]
        alike, shares_any = _equal(sharings), np.array([c.communicates for c in components])
        similar = _smooth(at_once, MODE_LENGTH) * _smooth(batch, MODE_LENGTH)
        costs = [*FIXED_COSTS.items(), *(WHOLE_FIXED.items() if is_whole else ())]
        shares = [std * np.log1p(cost / at_once) for cost, std in costs]
        fixed = sum(np.outer(share, share) for share in shares)
        level = KIND_STD**2 + fixed * (1.0 + BACKEND_FIXED**2 * backend)
        level += backend * MODE_STD**2 * mode * 0.5 * (1.0 + similar)
        if components[0].kind is ComponentKind.LAYER:
            level += LAYER_ATTENTION_STD**2 * _equal([b.attention for b in backends])
            level += LAYER_EXPERTS_STD**2 * _equal([b.experts for b in backends]) + TOGETHER_STD**2 * backend
        else:
            level += BACKEND_STD**2 * backend
        parts = _equal([c.part for c in components])
        if not parts.all():
            level += parts * (PART_STD**2 + PART_BACKEND_STD**2 * backend)
        own = FUSED_OWN_STD**2 * alike_fused + FUSED_BACKEND_STD**2 * backend + FUSED_FIXED**2 * fixed
        level += np.outer(fused, fused) * (FUSED_STD**2 + own)
        level += SHARING_STD**2 * alike * backend * np.outer(shares_any, shares_any)
        curve = alike * backend * _smooth(at_once, CURVE_LENGTH) * np.where(alike_fused, 1.0, FUSED_ALIKE)
        curve *= np.where(parts, 1.0, PART_ALIKE)
        return cls(np.asarray(level), np.asarray(curve))

    def restrict(self, rows: Sequence[int]) -> Covariance:
        """Return the covariance of some of the components."""
        return Covariance(self.level[np.ix_(rows, rows)], self.curve[np.ix_(rows, rows)])


def _equal(values: Sequence[object]) -> Floats:
    codes = np.unique([str(v) for v in values], return_inverse=True)[1]
    return np.asarray(codes[:, None] == codes[None, :], dtype=np.float64)


def _smooth(values: Floats, length: float) -> Floats:
    octaves = np.log2(values)
    return np.asarray(np.exp(-0.5 * ((octaves[:, None] - octaves[None, :]) / length) ** 2))


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
