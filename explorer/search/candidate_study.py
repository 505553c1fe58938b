"""The Optuna study of one variant. Every trial of components is asked from it, and told to it once it is stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import optuna
from optuna.study import Study
from optuna.trial import Trial as OptunaTrial
from optuna.trial import TrialState

from bexp.explorer.records.measurement import Measurement
from bexp.explorer.records.trial import Trial, TrialKind
from bexp.explorer.search.optuna_sampler import CandidateSampler, ComponentSampler
from bexp.explorer.search.optuna_trials import (
    FEASIBLE,
    REASON,
    distributions,
    final_state,
    final_value,
    frozen_trial,
    to_candidate,
    to_params,
    user_attrs,
    violation,
)
from bexp.explorer.search.search_state import SearchState
from bexp.explorer.search.stock_sampler import STOCK_SAMPLERS, StockCandidateSampler
from bexp.explorer.search.suggestion import Suggestion

CopyStudy = Callable[[str, Study], None]
"""A function that is called with a variant's study when it is opened and after each stored trial.

It must not change the study. Its second argument identifies the study within the job; it is empty for the main
variant.
"""


@dataclass(frozen=True, slots=True)
class AskedTrial:
    """A suggestion, and the running trial of the study that it belongs to."""

    suggestion: Suggestion
    trial: OptunaTrial


class CandidateStudy:
    """A study in memory, rebuilt from the stored trials. `study.ask()` is the only way to a suggestion.

    A trial is asked for, then observed, when it has measured something, then told, when it is stored. The state learns
    from observed trials. Whole models are no part of the study.
    """

    def __init__(self, state: SearchState, sampler: CandidateSampler, past: Sequence[Trial]) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # it would announce every trial on stderr
        self._state = state
        self._table = state.table
        self._sampler = sampler
        self._space = distributions(state.table.candidates)
        self.study = optuna.create_study(sampler=sampler, direction="maximize")
        for trial in past:
            if trial.kind is TrialKind.COMPONENTS:
                self.study.add_trial(frozen_trial(trial, self._space))
        state.learn_study(self.study)

    def ask(self) -> AskedTrial | None:
        """Ask for the next trial; null if the sampler has no suggestion, which leaves a failed trial behind."""
        asked = self.study.ask(self._space)
        suggestion = self._sampler.take_suggestion(asked.number)
        if suggestion is None:
            self.study.tell(asked, state=TrialState.FAIL)
            return None
        candidate = to_candidate(asked.params, self._table.model.variant)
        return self._explained(replace(suggestion, row=self._table.row[candidate]), asked)

    def ask_for(self, suggestion: Suggestion) -> AskedTrial:
        """Ask for a trial that the search itself needs, such as the base; it is enqueued, so no sampler chooses."""
        self.study.enqueue_trial(to_params(self._table.candidates[suggestion.row]))
        return self._explained(suggestion, self.study.ask(self._space))

    def observe(self, asked: AskedTrial, number: int, measurement: Measurement) -> None:
        """Attach what a running trial, `number` in its job, has measured; the state learns it."""
        for key, value in user_attrs(number, measurement).items():
            asked.trial.set_user_attr(key, value)
        self._state.learn_study(self.study)

    def tell(self, asked: AskedTrial, trial: Trial) -> None:
        """Finish a trial as it was stored."""
        for key, value in user_attrs(trial.number, trial.measurement).items():
            asked.trial.set_user_attr(key, value)
        asked.trial.set_constraint(FEASIBLE, violation(trial))
        self.study.tell(asked.trial, final_value(trial), final_state(trial))

    def _explained(self, suggestion: Suggestion, asked: OptunaTrial) -> AskedTrial:
        asked.set_user_attr(REASON, suggestion.reason)
        return AskedTrial(suggestion, asked)


def make_sampler(name: str, state: SearchState) -> CandidateSampler:
    """The sampler of a request: `bexp`, or one of `STOCK_SAMPLERS`."""
    return ComponentSampler(state) if name == "bexp" else StockCandidateSampler(state, STOCK_SAMPLERS[name])
