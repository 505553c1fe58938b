"""The importance of each dimension: how much of the differences in speed between candidates it explains."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bexp.explorer.cost.composition import Floats
from bexp.explorer.dimensions.candidate import DIMENSIONS, Candidate


def importance_of_dimensions(candidates: Sequence[Candidate], tokens_per_second_C: Floats) -> dict[str, float]:
    """Return the share of the variance of log tokens/s that each dimension explains by itself, the largest first.

    `tokens_per_second_C` has shape (C,), one rate above 0 for each candidate. For a dimension d it is the first-order
    index of Sobol' (Sensitivity estimates for nonlinear mathematical models, 1993), with each candidate counting once:

        S_d = Var(E[y | d]) / Var(y),  y = log(tokens/s)

    On candidates this is Pearson's correlation ratio: the variance of the means of groups with equal values of d, each
    weighted by its size, over that of all. Shares need not add up to 1: the rest is what dimensions do together,
    and dimensions whose values exclude each other share what they explain. A dimension with one value is left out, and
    all of them if only one varies or the candidates are equally fast.
    """
    log_C = np.log(tokens_per_second_C)
    if len(log_C) == 0 or (variance := float(log_C.var())) < np.finfo(np.float64).eps:
        return {}
    shares: dict[str, float] = {}
    for dimension in DIMENSIONS:
        numbers: dict[tuple[object, ...], int] = {}
        values = (tuple(getattr(candidate, name) for name in dimension.fields) for candidate in candidates)
        group_C = np.array([numbers.setdefault(value, len(numbers)) for value in values])
        if len(numbers) > 1:
            sizes = np.bincount(group_C)
            means = np.bincount(group_C, weights=log_C) / sizes
            between = float(np.average((means - log_C.mean()) ** 2, weights=sizes))
            shares[dimension.name] = min(1.0, between / variance)
    return dict(sorted(shares.items(), key=lambda item: -item[1])) if len(shares) > 1 else {}
