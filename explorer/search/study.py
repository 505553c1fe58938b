"""The Optuna study of a search: named parameters, tokens per second and a constraint, as any Optuna user expects.

Nothing is learnt from it: our trials are the truth, and the study is rebuilt from them. The search asks the study for
each trial of components, and the study asks the sampler. The study gets a trial as finished once it is stored. Whole
models are no part of it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial
from optuna.trial import Trial as OptunaTrial

from bexp.explorer.dimensions.candidate import DIMENSIONS, Candidate
from bexp.explorer.records.measurement import Outcome
from bexp.explorer.records.trial import Trial
from bexp.explorer.search.suggestion import Suggestion

TRIAL_NUMBER = "trial"
"""User attribute: the number of the trial in its job; a study counts only the trials of its variant."""
REASON = "reason"
"""User attribute: why a trial was suggested."""
OUTCOME = "outcome"
"""User attribute: how a trial ended."""
FEASIBLE = "feasible"
"""The constraint that a candidate runs and fits: above 0 where it does not."""
OFF = "off"
"""The value of a parameter that a candidate does without, such as a tile."""
PARAMETERS = {
    dimension.name if len(dimension.fields) == 1 else field: field
    for dimension in DIMENSIONS
    for field in dimension.fields
}
"""The parameters, each with the field of a candidate that it is."""

Params = Mapping[str, Any]
"""The values of named parameters, as Optuna stores them."""


def params_of(candidate: Candidate) -> dict[str, Any]:
    """Return a candidate as parameters."""
    return {name: _plain(getattr(candidate, field)) for name, field in PARAMETERS.items()}


def distributions(values_of: Mapping[str, Collection[Any]]) -> dict[str, BaseDistribution]:
    """Return the distribution of each parameter that is not always off: a range of integers, or categories."""
    by_name: dict[str, BaseDistribution] = {}
    for name, given in values_of.items():
        values = set(given)
        if all(isinstance(value, int) for value in values):
            by_name[name] = IntDistribution(min(values), max(values), log=True)
        elif values != {OFF}:
            by_name[name] = CategoricalDistribution(sorted(values, key=lambda value: (value != OFF, value)))
    return by_name


class Points:
    """The candidates of a space as Optuna sees them: the rows of a table with named parameters."""

    def __init__(self, points: Sequence[Params]) -> None:
        self._points = points
        self.distributions = distributions({name: {params[name] for params in points} for name in points[0]})
        self._rows = {self._key(params): row for row, params in enumerate(points)}

    def params(self, row: int) -> dict[str, Any]:
        """Return the parameters of a row."""
        return {name: self._points[row][name] for name in self.distributions}

    def row(self, params: Params) -> int | None:
        """Return the row that has these parameters; None if no candidate has them."""
        return self._rows.get(self._key(params))

    def _key(self, params: Params) -> tuple[Any, ...]:
        return tuple(params[name] for name in self.distributions)


class PointSampler(BaseSampler):
    """Chooses a point, and which of its components to measure, for each trial that is asked for."""

    def __init__(self, points: Points) -> None:
        self.points = points
        self.suggestions: dict[int, Suggestion] = {}
        """What trials of the study were asked for with, by their numbers in it, until it is taken."""

    @abstractmethod
    def suggest(self, study: Study, trial: FrozenTrial) -> Suggestion | None:
        """Return the next measurement by seed and finished trials alone; None if nothing is worth it."""

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All parameters: they are chosen together."""
        return self.points.distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The parameters of the next suggestion; those of any point if there is no suggestion."""
        if "fixed_params" in trial.system_attrs:  # it was enqueued with its parameters
            return {}
        suggestion = self.suggest(study, trial)
        if suggestion is not None:
            self.suggestions[trial.number] = suggestion
        return self.points.params(suggestion.row if suggestion is not None else 0)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Raise ValueError: it is never called for a parameter of the space."""
        raise ValueError(f"'{param_name}' is not a parameter of the space")


@dataclass(frozen=True, slots=True)
class AskedTrial:
    """A suggestion, and the running trial of the study that it belongs to."""

    suggestion: Suggestion
    trial: OptunaTrial


class TrialStudy:
    """A study in memory, rebuilt from the stored trials. `study.ask()` is the only way to a suggestion."""

    def __init__(self, sampler: PointSampler, past: Sequence[tuple[Params, Trial]]) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # it would announce every trial on stderr
        self._sampler = sampler
        self._points = sampler.points
        self.study = optuna.create_study(sampler=sampler, direction="maximize")
        self.study.add_trials(frozen_trial(trial, params, self._points.distributions) for params, trial in past)

    def ask(self) -> AskedTrial | None:
        """Ask for the next trial; None if the sampler has no suggestion, which leaves a failed trial behind."""
        asked = self.study.ask(self._points.distributions)
        suggestion = self._sampler.suggestions.pop(asked.number, None)
        if suggestion is None:
            self.study.tell(asked, state=TrialState.FAIL)
            return None
        row = self._points.row(asked.params)
        assert row is not None, "a sampler chooses among the points"
        return self._explained(replace(suggestion, row=row), asked)

    def ask_for(self, suggestion: Suggestion) -> AskedTrial:
        """Ask for a trial that the search itself needs, such as the base; it is enqueued, so no sampler chooses."""
        self.study.enqueue_trial(self._points.params(suggestion.row))
        return self._explained(suggestion, self.study.ask(self._points.distributions))

    def tell(self, asked: AskedTrial, trial: Trial) -> None:
        """Finish a trial as it was stored."""
        asked.trial.set_user_attr(TRIAL_NUMBER, trial.number)
        asked.trial.set_user_attr(OUTCOME, trial.measurement.outcome.value)
        asked.trial.set_constraint(FEASIBLE, _violation(trial))
        self.study.tell(asked.trial, _value(trial), _state(trial))

    def _explained(self, suggestion: Suggestion, asked: OptunaTrial) -> AskedTrial:
        asked.set_user_attr(REASON, suggestion.reason)
        return AskedTrial(suggestion, asked)


def frozen_trial(trial: Trial, params: Params, space: Mapping[str, BaseDistribution]) -> FrozenTrial:
    """Return a stored trial as a finished Optuna trial, for a study that has not seen it."""
    return create_trial(
        state=_state(trial),
        value=_value(trial),
        params={name: params[name] for name in space},
        distributions=dict(space),
        user_attrs={TRIAL_NUMBER: trial.number, OUTCOME: trial.measurement.outcome.value},
        constraints={FEASIBLE: _violation(trial)},
    )


def _state(trial: Trial) -> TrialState:
    """Return the state of a finished trial for Optuna.

    A candidate that ran has a value. One that cannot run is complete as well, with its constraint violated, so that no
    sampler asks for it again. A contaminated trial, and one that measured what all candidates share, tells samplers
    nothing; Optuna's samplers ignore failed trials.
    """
    outcome = trial.measurement.outcome
    tells_nothing = outcome is Outcome.CONTAMINATED or (outcome is Outcome.OK and trial.tokens_per_second is None)
    return TrialState.FAIL if tells_nothing else TrialState.COMPLETE


def _value(trial: Trial) -> float | None:
    """Return the objective: tokens/s, 0 for a candidate that cannot run, None if the trial says nothing."""
    return (trial.tokens_per_second or 0.0) if _state(trial) is TrialState.COMPLETE else None


def _violation(trial: Trial) -> float:
    return -1.0 if trial.measurement.outcome is Outcome.OK else 1.0


def _plain(value: Any) -> Any:
    return OFF if value is None else value.value if isinstance(value, Enum) else value
