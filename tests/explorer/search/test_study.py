"""The Optuna study of a search: what Optuna's users see of it, and how it is asked and told."""

from __future__ import annotations

import optuna
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from bexp.explorer.records.measurement import Outcome
from bexp.explorer.records.trial import Trial
from bexp.explorer.search.study import (
    FEASIBLE,
    OUTCOME,
    TRIAL_NUMBER,
    AskedTrial,
    Points,
    PointSampler,
    TrialStudy,
    params_of,
)
from bexp.explorer.search.suggestion import Suggestion
from tests.explorer.explorations import run, trials_of
from tests.explorer.search.small import REPORT, candidate, small_request, small_state, trial
from tests.explorer.simulator import SimulatedDevice

CANDIDATES = small_state().table.candidates


class Scripted(PointSampler):
    """Suggests what it is told, one after another."""

    def __init__(self, *suggestions: Suggestion | None) -> None:
        super().__init__(Points([params_of(each) for each in CANDIDATES]))
        self.left = list(suggestions)

    def suggest(self, study: Study, trial: FrozenTrial) -> Suggestion | None:
        return self.left.pop(0)


def study_of(*suggestions: Suggestion | None, past: tuple[Trial, ...] = ()) -> TrialStudy:
    return TrialStudy(Scripted(*suggestions), [(params_of(each.candidate), each) for each in past])


def ask(study: TrialStudy) -> AskedTrial:
    asked = study.ask()
    assert asked is not None
    return asked


def test_plain_optuna_shows_what_was_tried_what_it_reached_and_what_did_not_fit() -> None:
    """The study of stored trials, opened in a storage of Optuna's as any of its users opens one."""
    req = small_request(verify=False, budget={"confidence_target": 99})
    trials = trials_of(run(req, SimulatedDevice(req, noise=0.0), rep=REPORT))
    trials.append(trial(99, candidate(4, recompute="full"), Outcome.OUT_OF_MEMORY))
    storage = optuna.storages.InMemoryStorage()
    made = optuna.create_study(study_name="job", storage=storage, direction="maximize")
    made.add_trials(study_of(past=tuple(trials)).study.trials)
    found = optuna.load_study(study_name="job", storage=storage)
    for seen, stored in zip(found.trials, trials, strict=True):
        assert seen.params.items() <= params_of(stored.candidate).items()
        assert {"micro_batch_size", "attention", "recompute"} <= seen.params.keys()
        assert seen.value == (stored.tokens_per_second or 0.0)
        assert seen.user_attrs == {TRIAL_NUMBER: stored.number, OUTCOME: stored.measurement.outcome.value}
    best = max(trials, key=lambda t: t.tokens_per_second or 0.0)
    assert found.best_trial.user_attrs[TRIAL_NUMBER] == best.number
    assert found.best_value == best.tokens_per_second
    assert found.best_params.items() <= params_of(best.candidate).items()
    assert [t.number for t in found.trials if t.constraints[FEASIBLE] > 0] == [len(trials) - 1]


def test_every_candidate_survives_the_way_through_parameters() -> None:
    points = Points([params_of(each) for each in CANDIDATES])
    for row in range(len(CANDIDATES)):
        params = points.params(row)
        assert points.row(params) == row
        for name, value in params.items():
            assert points.distributions[name]._contains(points.distributions[name].to_internal_repr(value))
    assert points.row({**points.params(0), "micro_batch_size": 3}) is None


def test_a_trial_is_told_as_it_was_stored() -> None:
    study = study_of(Suggestion(0, ()), Suggestion(1, ()))
    study.tell(ask(study), trial(3, CANDIDATES[0], tokens=1000.0))
    study.tell(ask(study), trial(4, CANDIDATES[1], Outcome.OUT_OF_MEMORY))
    one, other = study.study.trials
    assert (one.state, one.value, one.constraints) == (TrialState.COMPLETE, 1000.0, {FEASIBLE: -1.0})
    assert (other.state, other.value, other.constraints) == (TrialState.COMPLETE, 0.0, {FEASIBLE: 1.0})
    assert [t.user_attrs[TRIAL_NUMBER] for t in (one, other)] == [3, 4]
