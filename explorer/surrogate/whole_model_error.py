"""How far composed steps are off whole models: what is expected before one is run, and what those that were run teach.

The logarithm of whole over composed tokens/s is the sum of three Gaussian parts: one that all candidates of a model
share, one that those of a recomputation policy share, and a candidate's own. The first is wide and does not change the
order of candidates; whole models show most of it, so that candidates which were run whole and those which were not stay
comparable. Samples are conditioned by Matheron's rule (Wilson et al., 2020, arXiv:2002.09309), with the covariance of
the composed throughputs themselves taken from their samples, as an ensemble Kalman filter does (Evensen, 1994): a whole
model also tells what the blurred timing of its components was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from explorer.cost_model.candidate_table import Floats, Ints
from explorer.spec.candidate import Candidate

OWN_STD = {"cuda": 0.006, "cpu": 0.01}
"""Error of a composed step that is a candidate's own.

In benchmarks/results/h200-recorded-fidelity.json the candidates of a table that come within 7% of its best, and that
the device limits, scatter around their mean error by 0.8 to 1.0% (five tables). The noise of their components, of 0.4%
(attention) to 2.5% (FFN) a run, explains 0.5 to 1.0% of a step; with 0.75% of it the rest is this.
"""
POLICY_STD = 0.005
"""Error of composed steps that candidates of one recomputation policy share, tiled or not, in one layout and sharding.

There, policies differ from none at the same micro-batch size by 0.8% in the median of the absolute values, components'
noise included.
"""
COMMON_STD = {"cuda": 0.03, "cpu": 0.10}
"""Error that all candidates of a model share: wide beside the others, so that what all have in common stays common."""
RUN_STD = {"cuda": 0.001, "cpu": 0.01}
"""Of two runs of one whole model, beyond the standard error that each states and the noise of its blocks."""
PRIOR_RUNS = 4
"""The scale of all three parts rests on as many whole models before the first is run.

It grows where whole models are further off than the parts explain (the mean of an inverse gamma distribution with as
many degrees of freedom), and never falls below what was recorded.
"""


@dataclass(frozen=True, slots=True)
class WholeModelRun:
    """A candidate's whole model: the logarithm of its tokens/s, and the relative standard error that it states."""

    log_tokens: float
    standard_error: float


class CompositionErrors:
    """Samples of the error of every candidate's composition.

    Axes: N samples, C candidates, A some of them, J those that were run whole. The samples are drawn once; those for a
    whole model's noise have a seed of their own, so that nothing depends on the order in which whole models were run.
    """

    def __init__(
        self, candidates: Sequence[Candidate], device_kind: str, seed: int, num_samples: int, rng: np.random.Generator
    ) -> None:
        self._seed = seed
        self._device_kind = device_kind
        self._own_NC = rng.standard_normal((num_samples, len(candidates)), dtype=np.float32)
        policies = [
            (
                c.recompute.value,
                c.bta_tile is not None,
                c.context_parallel_size,
                c.context_parallel_layout or "",
                c.sharding or "",
            )
            for c in candidates
        ]
        codes = {policy: i for i, policy in enumerate(sorted(set(policies)))}
        self._policy_C: Ints = np.array([codes[policy] for policy in policies])
        self._policy_NP = rng.standard_normal((num_samples, len(codes)))
        self._common_N = rng.standard_normal(num_samples)

    def sample(self, number: int, rows: Ints, scale: float = 1.0) -> Floats:
        """The first `number` samples of the errors of `rows`, shape (N, A), before whole models are looked at."""
        error_NA = OWN_STD[self._device_kind] * self._own_NC[:number, rows].astype(np.float64)
        error_NA += POLICY_STD * self._policy_NP[:number, self._policy_C[rows]]
        error_NA += COMMON_STD[self._device_kind] * self._common_N[:number, None]
        return np.asarray(scale * error_NA)

    def covariance(self, rows: Ints, others: Ints, scale: float = 1.0) -> Floats:
        """Of the errors of `rows` with those of `others`, shape (A, J)."""
        own = rows[:, None] == others
        policy = self._policy_C[rows][:, None] == self._policy_C[others]
        variances = OWN_STD[self._device_kind] ** 2 * own + POLICY_STD**2 * policy + COMMON_STD[self._device_kind] ** 2
        return np.asarray(scale**2 * variances)

    def condition(
        self, runs: Mapping[int, WholeModelRun], log_mean_J: Floats, log_composed_NJ: Floats, blocks_std_J: Floats
    ) -> Correction:
        """What `runs`, by row, at least one, teach.

        `log_mean_J` and `log_composed_NJ` are mean and samples of the logarithms of their composed tokens/s, in the
        order of the rows; `blocks_std_J` is by how much two runs of such a step differ, as runs of its blocks do.
        """
        rows_J = np.array(sorted(runs), dtype=np.int64)
        found = [runs[row] for row in sorted(runs)]
        log_tokens_J = np.array([run.log_tokens for run in found])
        stated_J = np.array([run.standard_error for run in found])
        noise_J = np.sqrt(stated_J**2 + RUN_STD[self._device_kind] ** 2 + blocks_std_J**2)
        centred_NJ = log_composed_NJ - log_composed_NJ.mean(axis=0)
        around = centred_NJ.T @ centred_NJ / (len(centred_NJ) - 1) + np.diag(noise_J**2)
        distance_J = log_tokens_J - log_mean_J
        surprise = float(distance_J @ np.linalg.solve(around + self.covariance(rows_J, rows_J), distance_J))
        scale = float(np.sqrt(max(1.0, (PRIOR_RUNS + surprise) / (PRIOR_RUNS + len(found)))))
        number = len(log_composed_NJ)
        imagined_NJ = log_composed_NJ + self.sample(number, rows_J, scale) + noise_J * self._noise(rows_J, number)
        inverse_JJ = np.linalg.inv(around + self.covariance(rows_J, rows_J, scale))
        return Correction(
            self, rows_J, scale, centred_NJ, (log_tokens_J - imagined_NJ) @ inverse_JJ, distance_J @ inverse_JJ
        )

    def _noise(self, rows_J: Ints, number: int) -> Floats:
        draws = [np.random.default_rng([self._seed, int(row)]).standard_normal(number) for row in rows_J]
        return np.stack(draws, axis=1)


@dataclass(frozen=True, slots=True)
class Correction:
    """What the whole models of `rows_J` change in the throughput of any candidate, as shifts of its logarithm.

    `scale` multiplies the standard deviations of all parts of the error. `weights_NJ` and `weights_J` are the
    distances of the whole models from what a sample, and the mean, led to expect, in units of the covariances.
    """

    errors: CompositionErrors
    rows_J: Ints  # noqa: N815 - axes are in names
    scale: float
    centred_NJ: Floats  # noqa: N815 - axes are in names
    weights_NJ: Floats  # noqa: N815 - axes are in names
    weights_J: Floats  # noqa: N815 - axes are in names

    def mean(self, rows: Ints, log_composed_NA: Floats) -> Floats:
        """Shifts of the expected throughput of `rows`, shape (A,)."""
        return np.asarray((self._around(log_composed_NA) + self._errors_with(rows)) @ self.weights_J)

    def samples(self, rows: Ints, log_composed_NA: Floats) -> tuple[Floats, Floats]:
        """Shifts of the samples of `rows`, shape (N, A): of the components' part, and of that of their composition."""
        weights_NJ = self.weights_NJ[: len(log_composed_NA)]
        return np.asarray(weights_NJ @ self._around(log_composed_NA).T), np.asarray(
            weights_NJ @ self._errors_with(rows).T
        )

    def expected_errors(self, rows: Ints) -> Floats:
        """The part of `mean` that is the composition's, shape (A,)."""
        return np.asarray(self._errors_with(rows) @ self.weights_J)

    def _errors_with(self, rows: Ints) -> Floats:
        return self.errors.covariance(rows, self.rows_J, self.scale)

    def _around(self, log_composed_NA: Floats) -> Floats:
        """Covariance of composed throughputs with those that were run whole, shape (A, J)."""
        number = len(log_composed_NA)
        centred_NA = log_composed_NA - log_composed_NA.mean(axis=0)
        return np.asarray(centred_NA.T @ self.centred_NJ[:number] / (number - 1))
