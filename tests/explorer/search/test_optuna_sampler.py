"""The samplers that `study.ask()` calls."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
from optuna.study import Study

from bexp.explorer.search.acquisition import suggest_measurement
from bexp.explorer.search.optuna_sampler import CandidateSampler, ComponentSampler
from bexp.explorer.search.optuna_trials import distributions, to_params
from bexp.explorer.search.suggestion import Suggestion
from tests.explorer.search.small import candidate, know, small_state


class Scripted(CandidateSampler):
    """Suggests what it is told, one after another."""

    def __init__(self, state: Any, *suggestions: Suggestion | None) -> None:
        super().__init__(state)
        self.left = list(suggestions)

    def suggest(self, study: Study) -> Suggestion | None:
        return self.left.pop(0)


def scripted(*rows: int | None) -> tuple[Study, Scripted, dict[str, Any]]:
    state = small_state()
    sampler = Scripted(state, *(None if row is None else Suggestion(row, ()) for row in rows))
    study = optuna.create_study(sampler=sampler, direction="maximize")
    return study, sampler, distributions(state.table.candidates)


def test_a_trial_has_all_dimensions_of_the_suggested_candidate() -> None:
    study, sampler, space = scripted(5)
    asked = study.ask(space)
    assert asked.params == to_params(sampler.state.table.candidates[5])
    assert sampler.take_suggestion(asked.number) == Suggestion(5, ())


def test_a_suggestion_belongs_to_its_trial_and_is_taken_once() -> None:
    study, sampler, space = scripted(5, 7)
    first, second = study.ask(space), study.ask(space)
    assert sampler.take_suggestion(second.number) == Suggestion(7, ())
    assert sampler.take_suggestion(second.number) is None
    assert sampler.take_suggestion(first.number) == Suggestion(5, ())


def test_without_a_suggestion_the_trial_has_the_first_candidate_and_nothing_to_take() -> None:
    study, sampler, space = scripted(None)
    asked = study.ask(space)
    assert asked.params == to_params(sampler.state.table.candidates[0])
    assert sampler.take_suggestion(asked.number) is None


def test_an_enqueued_trial_is_not_chosen_by_the_sampler() -> None:
    study, sampler, space = scripted(5)
    wanted = sampler.state.table.candidates[3]
    study.enqueue_trial(to_params(wanted))
    asked = study.ask(space)
    assert asked.params == to_params(wanted)
    assert len(sampler.left) == 1, "it was not asked"
    assert sampler.take_suggestion(asked.number) is None


def test_dimensions_are_sampled_together_and_others_do_not_exist() -> None:
    study, _, _ = scripted(5)
    with pytest.raises(ValueError, match="'temperature' is not a dimension of the space"):
        study.ask().suggest_float("temperature", 0.0, 1.0)


def test_the_default_sampler_takes_the_measurement_with_the_highest_gain() -> None:
    state = small_state()
    know(state, candidate(1))
    sampler = ComponentSampler(state)
    study = optuna.create_study(sampler=sampler)
    expected = suggest_measurement(state)
    assert expected is not None
    assert sampler.suggest(study) == expected
