"""The order of a search: first what runs eagerly and is soon known, then all that may be faster."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bexp.explorer.cost.composition import Mask
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.dimensions.kernels import Kernels
from bexp.explorer.records.trial import Trial
from bexp.explorer.search.history import TrialHistory
from bexp.explorer.search.noise_limit import LIMITED_SHARE
from bexp.explorer.search.posterior import Posterior

FIRST_CONFIDENCE = 90
FIRST_SHARE = 0.25
"""The share of a variant's seconds after which the first stage is over, whatever its confidence."""


class SearchStages:
    """Says which candidates the search looks at. A stage depends on the stored trials alone.

    The first stage has the candidates with the base's loss, in eager code with the model's own kernels. It is left out
    if these are all candidates, or if one of Optuna's own samplers searches.
    """

    def __init__(self, posterior: Posterior, base: Candidate, trials: Sequence[Trial]) -> None:
        self._posterior = posterior
        candidates = posterior.table.candidates
        self._first_C: Mask = np.array([_is_first(candidate, base) for candidate in candidates])
        begun = any(not self._first_C[posterior.table.row[t.candidate]] for t in _known(trials, posterior))
        self.is_last = bool(self._first_C.all()) or begun or posterior.request.sampler != "bexp"

    @property
    def posterior(self) -> Posterior:
        """The posterior by which the search decides."""
        return self._posterior if self.is_last else self._posterior.among(self._first_C)

    @property
    def confidence_target(self) -> int:
        """The confidence, among the candidates of a stage, with which that stage is over."""
        target = self._posterior.request.budget.confidence_target
        return target if self.is_last else min(target, FIRST_CONFIDENCE)

    def is_spent(self, history: TrialHistory, *, noisy: bool) -> bool:
        """Return whether the first stage has had its share of the seconds;

        it is smaller if noise limits the confidence.
        """
        spent = history.seconds_of(self._posterior.table.model.variant)
        share = LIMITED_SHARE if noisy else FIRST_SHARE
        return not self.is_last and spent >= share * history.seconds_each


def _is_first(candidate: Candidate, base: Candidate) -> bool:
    eager = candidate.execution in (None, Execution.EAGER)
    return eager and candidate.kernels in (None, Kernels.LIBRARY) and candidate.loss == base.loss


def _known(trials: Sequence[Trial], posterior: Posterior) -> list[Trial]:
    return [trial for trial in trials if trial.candidate in posterior.table.row]
