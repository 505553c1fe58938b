"""The base, whose performance is 1.00x: the choice of a candidate, and its further runs on a noisy device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.search.noise_limit import run_noise, shown_noise
from bexp.explorer.search.posterior import Posterior
from bexp.explorer.search.suggestion import Suggestion

NOISY = 0.02
"""If two runs of the base's micro-step differ by more than this share, one run is not enough for what rests on it.

A CPU counts as noisy until its runs show otherwise, any other device once they surely show it.
"""
RUNS, LAST_RUNS = 2, 3
"""How often it is then measured before the search goes on, and before the answer."""
TELLING_SHARE = 0.1
"""Components with a smaller share of the micro-step are not measured again."""


class BaseCandidate:
    """Chooses the first of `bases`, in order of preference, that fits."""

    def __init__(self, posterior: Posterior, bases: Sequence[Candidate]) -> None:
        self._posterior = posterior
        self._bases = bases

    def known(self) -> Candidate | None:
        """The first base that fits, if it is measured in full; None if one before it may fit and is not measured."""
        for candidate in self._bases:
            row = self._posterior.table.row[candidate]
            if self._posterior.is_open(row):
                if not self._posterior.is_known(row):
                    return None
                if self._posterior.fits(row):
                    return candidate
        return None

    def again(self, base: Candidate, runs: int) -> Suggestion | None:
        """Another run of the base, which is known, on a noisy device; None once it was run so often.

        What is in flight is not suggested again.
        """
        posterior, table = self._posterior, self._posterior.table
        row = table.row[base]
        noise = run_noise if posterior.hardware.device_kind == "cpu" else shown_noise
        if not posterior.is_open(row) or noise(posterior, row) <= NOISY:
            return None
        shares_P = table.step_shares(posterior.surrogate.device_mean_K, np.array([row]))[0]
        telling = [
            table.components[column]
            for column, share in zip(table.columns_CP[row], shares_P, strict=True)
            if share >= TELLING_SHARE
        ]
        pending = {c for each in posterior.knowledge.pending.values() for c in each.components}
        left = tuple(c for c in telling if posterior.count_attempts(c) < runs and c not in pending)
        return Suggestion(row, left, again=True, reason="runs of the base differ") if left else None
