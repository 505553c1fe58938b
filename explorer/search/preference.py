"""Chooses the candidate to recommend among the contenders, by what the request prefers."""

from __future__ import annotations

import numpy as np

from explorer.cost_model.candidate_table import Floats, Ints
from explorer.search.candidate_posterior import CandidatePosterior
from explorer.spec.request import ExplorationRequest


def recommended_position(posterior: CandidatePosterior, required_C: Floats, request: ExplorationRequest) -> int | None:
    """Return the position, among the contenders, of the candidate to recommend; null if none is known well enough.

    It is the one with the highest expected throughput, or what `smallest_position` finds if memory is preferred.
    """
    fastest = posterior.incumbent
    if fastest is None or request.prefer == "speed":
        return fastest
    clear, confidence_A = np.flatnonzero(posterior.clear_A), posterior.confidences(request.tolerance)
    return smallest_position(posterior, clear, confidence_A, fastest, required_C, request)


def smallest_position(
    posterior: CandidatePosterior,
    eligible: Ints,
    confidence_A: Floats,
    fastest: int,
    required_C: Floats,
    request: ExplorationRequest,
) -> int:
    """Return the position of the smallest peak among those that are surely enough within the tolerance.

    Surely enough means the confidence that the request aims at, or that of the fastest if it is lower. So the
    preference does not lower the confidence of an answer below what was asked for.
    """
    least = min(request.budget.confidence_target / 100, float(confidence_A[fastest]))
    within = eligible[confidence_A[eligible] >= least]
    return int(min(within, key=lambda i: (required_C[posterior.rows[i]], -posterior.mean_A[i])))


def smallest_row(posterior: CandidatePosterior, required_C: Floats, loss: float) -> int | None:
    """Return the row with the smallest peak among the known contenders that lose at most `loss` against the fastest.

    `loss` is a share of the fastest candidate's expected tokens/s; 0 gives the fastest itself.
    """
    fastest = posterior.incumbent
    if fastest is None:
        return None
    near = np.flatnonzero(posterior.clear_A & (posterior.mean_A >= (1.0 - loss) * posterior.mean_A[fastest]))
    best = min(near, key=lambda i: (required_C[posterior.rows[i]], -posterior.mean_A[i]))
    return int(posterior.rows[best])
