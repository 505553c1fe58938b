"""The runner-up: the candidate to run whole next to the recommended one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bexp.explorer.search.posterior import Posterior

MATTERS = 0.25
"""Share of the tolerance by which a runner-up must be faster for its whole model to be worth a run."""
MOST_GAIN = 0.1
"""A candidate's improvement counts as at most this share when runner-ups are ranked.

Without a limit, candidates that hardly fit and would be several times as fast go first. Then none of the few whole
models are left for one that is sure to fit and likely to be better.
"""
MOST_WHOLE_RUNS = 3
"""The most whole models of one candidate, unless it is the recommended one."""


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """The row of a candidate to run whole."""

    row: int
    probability: float
    """That of being faster than the recommended candidate by more than MATTERS of the tolerance."""
    gain: float
    """The expected improvement, as a share of the recommended candidate's throughput."""
    probability_fits: float
    """That of the whole model to fit."""


def find_runner_up(posterior: Posterior) -> RunnerUp | None:
    """Return the candidate whose whole model is expected to improve the answer most; None if there is none to run.

    It is the contender with the highest expected gain over the recommended candidate (MOST_GAIN), or the faster one of
    two equal ones. The gain counts all that is not known: the error of composition, whether it fits, components that
    were predicted, and the noise of whole models that ran.

    The recommended candidate itself is returned if the contender was run whole more often, because another run of it
    tells more. Without a recommended candidate, the contender that is most likely to fit is returned.
    """
    contenders, rows = posterior.contenders, posterior.contenders.rows
    recommended = posterior.recommended_position
    number_A = np.array([posterior.knowledge.whole_models.count(int(row)) for row in rows])
    others = [i for i in range(rows.size) if i != recommended and number_A[i] < MOST_WHOLE_RUNS]
    if not others:
        return None
    if recommended is None:
        others = [i for i in others if not number_A[i]]
        if not others:
            return None
        best = max(others, key=lambda i: (contenders.runs_A[i], contenders.tokens_NA[:, i].mean()))
        return RunnerUp(int(rows[best]), fits := float(contenders.runs_A[best]), 1.0, fits)
    gain, rank = contenders.expected_gains(recommended), contenders.expected_gains(recommended, MOST_GAIN)
    best = max(others, key=lambda i: (rank[i], contenders.mean_A[i]))
    faster = contenders.probability_faster(recommended, posterior.request.tolerance * MATTERS)
    row = recommended if number_A[best] > number_A[recommended] else best
    return RunnerUp(int(rows[row]), float(faster[best]), float(gain[best]), float(contenders.runs_A[row]))


def find_above_limit(posterior: Posterior) -> RunnerUp | None:
    """Return the candidate above the memory limit whose whole model is worth most if it fits; None if there is none.

    Its gain is the probability that it fits, times how much faster it is expected to be than the fastest one that fits.
    That probability is computed, because a few hundred samples hold too few in which an unlikely candidate fits.
    """
    contenders = posterior.contenders
    if contenders.incumbent is None or not contenders.undecided_A.any():
        return None
    fits_A = np.where(contenders.undecided_A, posterior.memory.chance_C[contenders.rows], 0.0)
    gain_A = fits_A * np.maximum(0.0, contenders.mean_A / contenders.mean_A[contenders.incumbent] - 1.0)
    best = int(np.argmax(gain_A))
    return RunnerUp(int(contenders.rows[best]), float(fits_A[best]), float(gain_A[best]), float(fits_A[best]))
