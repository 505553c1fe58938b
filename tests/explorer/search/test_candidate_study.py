"""The study of a variant: asked, observed, told, and rebuilt from what is stored."""

from __future__ import annotations

from optuna.trial import TrialState

from bexp.explorer.records.measurement import Outcome
from bexp.explorer.records.trial import Trial, TrialKind
from bexp.explorer.search.candidate_study import AskedTrial, CandidateStudy
from bexp.explorer.search.optuna_sampler import CandidateSampler
from bexp.explorer.search.optuna_trials import FEASIBLE, MEASUREMENT, REASON, TRIAL_NUMBER, to_params
from bexp.explorer.search.search_state import SearchState
from bexp.explorer.search.suggestion import Suggestion
from tests.explorer.search.small import candidate, measure, small_state, trial


class Chooses(CandidateSampler):
    """Suggests one candidate with all that is missing of it, or nothing."""

    row: int | None = None

    def suggest(self, study: object) -> Suggestion | None:
        return None if self.row is None else Suggestion(self.row, self.state.missing(self.row), reason="a choice")


def study_of(state: SearchState, *past: Trial, row: int | None = None) -> CandidateStudy:
    sampler = Chooses(state)
    sampler.row = row
    return CandidateStudy(state, sampler, past)


def stored(state: SearchState, number: int, size: int = 1) -> Trial:
    found = measure(state, state.table.decompositions[state.table.row[candidate(size)]].components, candidate(size))
    return Trial(number=number, kind=TrialKind.COMPONENTS, measurement=found, tokens_per_second=1000.0)


def ask(study: CandidateStudy) -> AskedTrial:
    asked = study.ask()
    assert asked is not None
    return asked


def test_a_suggestion_keeps_its_components_and_its_reason() -> None:
    state = small_state()
    row = state.table.row[candidate(4)]
    study = study_of(state, row=row)
    asked = ask(study)
    assert asked.suggestion == Suggestion(row, state.missing(row), reason="a choice")
    (running,) = study.study.trials
    assert (running.state, running.user_attrs) == (TrialState.RUNNING, {REASON: "a choice"})


def test_without_a_suggestion_a_failed_trial_is_left_behind() -> None:
    study = study_of(small_state())
    assert study.ask() is None
    assert [t.state for t in study.study.trials] == [TrialState.FAIL]


def test_what_the_search_itself_needs_is_a_trial_too() -> None:
    state = small_state()
    study = study_of(state)
    wanted = Suggestion(state.table.row[candidate(2)], (), reason="a base")
    asked = study.ask_for(wanted)
    assert asked.suggestion is wanted
    (running,) = study.study.trials
    assert running.params == to_params(candidate(2))
    assert running.user_attrs == {REASON: "a base"}


def test_what_is_observed_is_learnt_before_the_trial_is_told() -> None:
    state = small_state()
    row = state.table.row[candidate(2)]
    study = study_of(state, row=row)
    asked = ask(study)
    made = stored(state, 17, 2)
    study.observe(asked, 17, made.measurement)
    assert state.is_known(row)
    (running,) = study.study.trials
    assert running.state is TrialState.RUNNING
    assert running.user_attrs[TRIAL_NUMBER] == 17
    study.tell(asked, made)
    (told,) = study.study.trials
    assert (told.state, told.value) == (TrialState.COMPLETE, 1000.0)
    assert told.constraints[FEASIBLE] == -1.0


def test_a_trial_is_told_as_it_was_stored() -> None:
    state = small_state()
    study = study_of(state, row=state.table.row[candidate(2)])
    asked = ask(study)
    made = stored(state, 3, 2)
    study.observe(asked, 3, made.measurement)
    judged = made.measurement.model_copy(update={"outcome": Outcome.OUT_OF_MEMORY, "reason": "too much"})
    study.tell(asked, made.model_copy(update={"measurement": judged, "tokens_per_second": None}))
    (told,) = study.study.trials
    assert (told.state, told.value, told.constraints[FEASIBLE]) == (TrialState.COMPLETE, 0.0, 1.0)
    assert "out_of_memory" in told.user_attrs[MEASUREMENT]


def test_a_study_is_rebuilt_from_stored_trials_without_whole_models() -> None:
    state = small_state()
    whole_model = trial(1, candidate(4), kind=TrialKind.WHOLE_MODEL)
    study = study_of(state, stored(state, 0), whole_model, stored(state, 2, 2))
    assert [t.user_attrs[TRIAL_NUMBER] for t in study.study.trials] == [0, 2]
    assert state.is_known(state.table.row[candidate(1)])
    assert state.is_known(state.table.row[candidate(2)])
    assert not state.is_known(state.table.row[candidate(4)])
