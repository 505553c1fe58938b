"""The candidates that may still be the best, and what the posterior says of each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from explorer.cost_model.candidate_table import Floats, Ints, Mask, SpaceTable
from explorer.surrogate.gaussian_process import Surrogate

PREDICTED_STD = 0.001
"""A component is not measured if what is unsure of it moves a candidate's micro-step by less than this share.

A candidate has at most a handful of such components, so that they move it by no more than a quarter of a tolerance of
1%; their uncertainty is part of every sample that the confidence counts.
"""


@dataclass(frozen=True, slots=True)
class CandidatePosterior:
    """Contenders as rows of the table. Axes: A contenders, P components of one, N posterior samples.

    `composed_NA` is tokens/s as the components compose it, zero where the candidate would not fit; `tokens_NA` that of
    the whole model. Both take whole models that were run into account. `wanted_AP` marks the components without which a
    candidate is not known well enough; of `clear_A` nothing is wanted, and it fits for all that is known. `mean_A` is
    the expected tokens/s.
    """

    rows: Ints
    mean_A: Floats  # noqa: N815 - axes are in names
    composed_NA: Floats  # noqa: N815 - axes are in names
    tokens_NA: Floats  # noqa: N815 - axes are in names
    wanted_AP: Mask  # noqa: N815 - axes are in names
    clear_A: Mask  # noqa: N815 - axes are in names

    @property
    def incumbent(self) -> int | None:
        """Position of the clear contender with the highest expected throughput."""
        clear = np.flatnonzero(self.clear_A)
        return int(clear[np.argmax(self.mean_A[clear])]) if clear.size else None

    def probability_best(self, position: int, tolerance: float) -> float:
        """Share of the samples in which a contender is within tolerance of the best."""
        best_N = self.tokens_NA.max(axis=1)
        return float((self.tokens_NA[:, position] >= (1.0 - tolerance) * best_N).mean())

    def probability_faster(self, position: int, margin: float) -> Floats:
        """Share of the samples in which each contender is faster than one by more than `margin`, shape (A,)."""
        return np.asarray((self.tokens_NA > (1.0 + margin) * self.tokens_NA[:, [position]]).mean(axis=0))


def wanted_components(table: SpaceTable, surrogate: Surrogate, rows: Ints) -> Mask:
    """Which components of candidates are neither measured nor predicted well enough, shape (rows, P)."""
    columns = table.columns_CP[rows]
    unsure = table.step_shares(surrogate.device_mean_K, rows) * surrogate.log_std_K[columns] > PREDICTED_STD
    return np.asarray(missing_components(table, surrogate, rows) & (unsure | surrogate.essential_K[columns]))


def missing_components(table: SpaceTable, surrogate: Surrogate, rows: Ints) -> Mask:
    """Which components of candidates are not measured, shape (rows, P)."""
    return np.asarray(table.used_CP[rows] & ~surrogate.known_K[table.columns_CP[rows]])


def contenders(table: SpaceTable, surrogate: Surrogate, rows: Ints, least: Floats) -> Ints:
    """Those of `rows` whose optimistic throughput reaches its `least` tokens/s; the others cannot decide anything."""
    optimistic_K = np.exp(surrogate.log_center_K - 3.5 * surrogate.log_std_K)
    upper = table.tokens_per_second(optimistic_K[None, :], surrogate.host_K, rows, surrogate.overlap)[0]
    return np.asarray(rows[upper >= least])
