"""Chooses the candidate to recommend among the contenders, by what the request prefers."""

from __future__ import annotations

import numpy as np

from bexp.explorer.cost_model.candidate_table import Floats, Ints
from bexp.explorer.search.candidate_posterior import CandidatePosterior
from bexp.explorer.spec.request import ExplorationRequest


def recommended_position(posterior: CandidatePosterior, required_C: Floats, request: ExplorationRequest) -> int | None:
    """Return the position, among the contenders, of the candidate to recommend; null if none is known well enough.

    It is the one with the highest expected throughput. If memory is preferred, it is the one with the smallest peak
    among those that are expected to be within the tolerance of it.
    """
    fastest = posterior.incumbent
    if fastest is None or request.prefer == "speed":
        return fastest
    return smallest_position(posterior, np.flatnonzero(posterior.clear_A), fastest, required_C, request.tolerance)


def smallest_position(
    posterior: CandidatePosterior, eligible: Ints, fastest: int, required_C: Floats, loss: float
) -> int:
    """Return the position of the smallest peak among the `eligible` that lose at most `loss` against the `fastest`.

    `loss` is a share of the expected tokens/s of the fastest; 0 gives the fastest itself, or an equal one.
    """
    near = eligible[posterior.mean_A[eligible] >= (1.0 - loss) * posterior.mean_A[fastest]]
    return int(min(near, key=lambda i: (required_C[posterior.rows[i]], -posterior.mean_A[i])))
