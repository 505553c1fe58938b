"""The confidence: how likely it is that a candidate is within the tolerance of the best.

It is the share of posterior samples in which that holds. Samples may be of whole models of candidates, of composed
steps of an extension, or of timings of a step. For candidates they are those of the contenders, which may still be the
best.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from bexp.explorer.cost.composition import Composition, Floats, Ints, Mask
from bexp.explorer.search.candidate_memory import CandidateMemory, MemoryErrors
from bexp.explorer.search.candidate_throughput import CandidateThroughput
from bexp.explorer.surrogate.gaussian_process import Surrogate
from bexp.explorer.surrogate.whole_model_error import sample_in_blocks

PREDICTED_STD = 0.001
"""A component need not be measured if its uncertainty moves a candidate's micro-step by less than this share.

A candidate has at most a handful of such components, so together they move it by no more than a quarter of a tolerance
of 1%. Their uncertainty is part of every sample that the confidence counts.
"""
OPTIMISTIC_DEVIATIONS = 3.5
"""A candidate is ruled out if it is too slow even at this many standard deviations below its expected seconds."""
RULED_OUT = 0.05
"""A size of a model that is measured whole is ruled out if no more than this share of samples has it faster."""
STEADY = 0.05
"""That holds while the recommended one is known this well: where timings scatter more, samples claim too much."""
MOST_CONFIDENT = 99


def confidences(own_NA: Floats, samples_NA: Floats, tolerance: float) -> Floats:
    """Return the confidence in each of A candidates, given N samples of their throughput and that of all, shape (A,).

    What does not run has a throughput of 0, and is not within the tolerance of anything.
    """
    best_N = samples_NA.max(axis=1, initial=0.0)
    return np.asarray(((own_NA > 0.0) & (own_NA >= (1.0 - tolerance) * best_N[:, None])).mean(axis=0))


def confidence_score(confidence: float) -> int:
    """Return a confidence as the score that is printed: floored to 0..99."""
    return min(MOST_CONFIDENT, math.floor(100 * confidence))


@dataclass(frozen=True, slots=True)
class Contenders:
    """The candidates that may still be the best. Axes: A contenders, P components of one, N posterior samples."""

    rows: Ints
    """Of the table."""
    mean_A: Floats  # noqa: N815 - axes are in names
    """The expected tokens/s."""
    composed_NA: Floats  # noqa: N815 - axes are in names
    """Tokens/s as the components compose it; zero where neither the composed bytes nor the whole model would fit.

    Like `tokens_NA` it takes into account the whole models that were run.
    """
    tokens_NA: Floats  # noqa: N815 - axes are in names
    """Tokens/s of the whole model, composition error included; zero where that would not run."""
    wanted_AP: Mask  # noqa: N815 - axes are in names
    """The components that must be measured before a candidate is known well enough."""
    clear_A: Mask  # noqa: N815 - axes are in names
    """The contenders that want nothing and are expected to fit."""
    undecided_A: Mask  # noqa: N815 - axes are in names
    """Those that want nothing, do not fit as composed, and may fit as whole models."""
    runs_A: Floats  # noqa: N815 - axes are in names
    """The probability that the whole model runs within the memory; 1 once it has."""
    is_whole: bool
    """Whether they are of a model that is measured whole."""

    @property
    def incumbent(self) -> int | None:
        """Position of the clear contender with the highest expected throughput; None if none is clear.

        A whole model that does not run counts as no throughput, so headroom in memory decides between equals.
        """
        clear = np.flatnonzero(self.clear_A)
        return int(clear[np.argmax((self.mean_A * self.runs_A)[clear])]) if clear.size else None

    def confidence(self, position: int, tolerance: float, among_A: Mask | None = None) -> float:
        """Probability that a contender's whole-model throughput is within `tolerance` of the best, 0..1.

        The best is that of all contenders, or of those in `among_A`.
        """
        samples_NA = self.tokens_NA if among_A is None else self.tokens_NA[:, among_A]
        confidence = float(confidences(self.tokens_NA[:, [position]], samples_NA, tolerance)[0])
        return min(confidence, self._measured_share(position, tolerance, among_A))

    def confidence_if_it_runs(self, position: int, tolerance: float) -> float:
        """The `confidence` in a contender provided that its whole model runs, the undecided ones left out, 0..1.

        Measurements of components cannot raise the confidence above it: whether a candidate near the limit runs, only
        its whole model tells.
        """
        runs_N = self.tokens_NA[:, position] > 0.0
        if not runs_N.any():
            return 0.0
        tokens_NA = self.tokens_NA[runs_N]
        confidence = float(confidences(tokens_NA[:, [position]], tokens_NA[:, ~self.undecided_A], tolerance)[0])
        return min(confidence, self._measured_share(position, tolerance))

    def _measured_share(self, position: int, tolerance: float, among_A: Mask | None = None) -> float:
        """For a model that is measured whole, the share of candidates measured among those not ruled out; else 1.

        A candidate that was not measured is ruled out if the one at `position` is within `tolerance` of it in all but
        RULED_OUT of the samples, and if two were measured: one alone does not show which way the speed goes. The first
        k of n candidates in any order include the best one with probability k / n. The samples alone would claim more,
        because they take speed for a smooth function of the size.
        """
        if not self.is_whole:
            return 1.0
        measured_A = ~self.wanted_AP.any(axis=1) & (self.tokens_NA > 0.0).any(axis=0)  # and it may fit
        own_N = self.tokens_NA[self.tokens_NA[:, position] > 0.0, position]
        is_steady = bool(own_N.size) and float(np.log(own_N).std()) <= STEADY
        likely = RULED_OUT if is_steady and measured_A.sum() > 1 else 0.0
        faster_NA = (1.0 - tolerance) * self.tokens_NA > self.tokens_NA[:, [position]]
        counts_A = measured_A | (faster_NA.mean(axis=0) > likely)
        if among_A is not None:
            counts_A &= among_A
        return float((measured_A & counts_A).sum() / max(1, counts_A.sum()))

    def expected_gains(self, position: int, most: float = math.inf) -> Floats:
        """Expected improvement over the contender at `position`, as a share of its expected throughput, shape (A,).

        In no sample does the improvement count as more than `most`.
        """
        own_N1 = self.tokens_NA[:, [position]]
        own = max(float(own_N1.mean()), 1e-9)
        return np.asarray(np.clip((self.tokens_NA - own_N1) / own, 0.0, most).mean(axis=0))

    def expected_regret(self, position: int) -> float:
        """The mean lead of the best contender over the one at `position`, as a share of its expected throughput.

        That is what it would be worth to know every candidate exactly (the expected value of perfect information).
        """
        own_N = self.tokens_NA[:, position]
        return float((self.tokens_NA.max(axis=1) - own_N).mean() / max(float(own_N.mean()), 1e-9))

    def probability_faster(self, position: int, margin: float) -> Floats:
        """Probability that each contender is faster than the one at `position` by more than `margin`, shape (A,)."""
        return np.asarray((self.tokens_NA > (1.0 + margin) * self.tokens_NA[:, [position]]).mean(axis=0))


def find_contenders(table: Composition, surrogate: Surrogate, rows: Ints, least_A: Floats) -> Ints:
    """Those of `rows` whose optimistic throughput reaches its `least_A` tokens/s; no other can change the answer."""
    optimistic_K = np.exp(surrogate.log_center_K - OPTIMISTIC_DEVIATIONS * surrogate.log_std_K)
    host_K = surrogate.host_K * np.exp(-OPTIMISTIC_DEVIATIONS * surrogate.host_std_K)
    upper = table.tokens_per_second(optimistic_K[None, :], host_K, rows, surrogate.overlap)[0]
    return np.asarray(rows[upper >= least_A])


def compute_contenders(
    table: Composition,
    surrogate: Surrogate,
    throughput: CandidateThroughput,
    memory: CandidateMemory,
    rows: Ints,
    errors: MemoryErrors,
    run_whole: Collection[int],
) -> Contenders:
    """Return what is known of the contenders `rows`.

    Args:
        table: the candidates and their components.
        surrogate: seconds and bytes of the components.
        throughput: tokens/s of the candidates.
        memory: bytes of the candidates.
        rows: the contenders.
        errors: the draws behind the samples of bytes.
        run_whole: rows whose whole model was run; nothing about their memory is uncertain.
    """
    composed_NA, tokens_NA = throughput.sample_logs(rows)
    # If an incumbent might not fit, every other candidate looks worth measuring. Where memory is tight, a candidate is
    # therefore measured in full: nothing else tells whether it fits.
    whole_A = np.isin(rows, list(run_whole))
    ran_A = whole_A & memory.fits_C[rows]
    tight_A = memory.is_tight(rows) & ~ran_A
    tight, near = np.flatnonzero(tight_A), np.flatnonzero(memory.is_near_limit(rows) & ~ran_A)
    number = len(composed_NA)
    fits_NA = np.ones(composed_NA.shape, dtype=np.bool_, order="F")
    fits_NA[:, tight] = memory.sample_fits(rows[tight], errors.components_N[:number])
    runs_NA = fits_NA.copy(order="F")
    near_NA = sample_in_blocks(lambda some: memory.sample_runs(some, errors, number), rows[near])
    runs_NA[:, near] = near_NA & ~whole_A[near]
    missing_AP = missing_components(table, surrogate, rows)
    wanted_AP = np.where(tight_A[:, None], missing_AP, wanted_components(table, surrogate, rows))
    wanted_AP[whole_A] = False  # the whole model said more than its components could
    return Contenders(
        rows=rows,
        mean_A=throughput.mean_C[rows],
        composed_NA=np.where(fits_NA | runs_NA, np.exp(composed_NA, out=composed_NA), 0.0),
        tokens_NA=np.where(runs_NA, np.exp(tokens_NA, out=tokens_NA), 0.0),
        wanted_AP=wanted_AP,
        clear_A=~wanted_AP.any(axis=1) & memory.fits_C[rows],
        undecided_A=~wanted_AP.any(axis=1) & memory.may_fit_C[rows] & ~memory.fits_C[rows],
        runs_A=runs_NA.mean(axis=0),
        is_whole=table.candidates[0].is_whole,
    )


def wanted_components(table: Composition, surrogate: Surrogate, rows: Ints) -> Mask:
    """Return which components of candidates are neither measured nor predicted well enough, shape (rows, P)."""
    columns = table.columns_CP[rows]
    unsure = table.step_shares(surrogate.device_mean_K, rows) * surrogate.log_std_K[columns] > PREDICTED_STD
    return np.asarray(missing_components(table, surrogate, rows) & (unsure | surrogate.essential_K[columns]))


def missing_components(table: Composition, surrogate: Surrogate, rows: Ints) -> Mask:
    """Return which components of candidates are not measured, shape (rows, P)."""
    return np.asarray(table.used_CP[rows] & ~surrogate.known_K[table.columns_CP[rows]])
