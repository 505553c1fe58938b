"""Samplers of candidates: what `study.ask()` calls to choose the next one."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from bexp.explorer.search.acquisition import suggest_measurement
from bexp.explorer.search.optuna_trials import distributions, to_params
from bexp.explorer.search.search_state import SearchState
from bexp.explorer.search.suggestion import Suggestion

FIXED_PARAMS = "fixed_params"
"""Optuna's system attribute of a trial that was enqueued with its parameters: there is nothing to choose for it."""


class CandidateSampler(BaseSampler):
    """Chooses a row of the table, and which of its components to measure, for each trial that is asked for.

    A sampler owns only its next suggestion; what is known is the `SearchState`'s, which learns from the study.
    """

    def __init__(self, state: SearchState) -> None:
        self.state = state
        self._space = distributions(state.table.candidates)
        self._suggestions: dict[int, Suggestion] = {}

    @abstractmethod
    def suggest(self, study: Study) -> Suggestion | None:
        """What to measure next; null if nothing is worth it. It depends on the seed and the study's trials alone."""

    def take_suggestion(self, number: int) -> Suggestion | None:
        """The suggestion that trial `number` of the study was asked for with; null if there was none."""
        return self._suggestions.pop(number, None)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The dimensions, with every value that occurs in the space."""
        return self._space

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The dimensions of the next suggestion's candidate; of any candidate if there is no suggestion."""
        if FIXED_PARAMS in trial.system_attrs:
            return {}
        suggestion = self.suggest(study)
        if suggestion is not None:
            self._suggestions[trial.number] = suggestion
        return to_params(self.state.table.candidates[suggestion.row if suggestion is not None else 0])

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Never called for a dimension: all of them are sampled together.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"'{param_name}' is not a dimension of the space")


class ComponentSampler(CandidateSampler):
    """The default sampler, `bexp`: the measurement with the highest expected gain a second."""

    def suggest(self, study: Study) -> Suggestion | None:
        """The acquisition's choice."""
        return suggest_measurement(self.state)
