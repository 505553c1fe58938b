"""The samplers: ours, and Optuna's own, which see legal candidates alone and suggest the same after a resume."""

from __future__ import annotations

from typing import Any

import optuna
import pytest

from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.search.posterior import Posterior
from bexp.explorer.search.samplers import (
    STOCK_SAMPLERS,
    BexpSampler,
    SearchStages,
    StockCandidateSampler,
    StockSampler,
    make_sampler,
    suggest_measurement,
)
from bexp.explorer.search.study import Params, Points, TrialStudy, params_of
from tests.explorer.explorations import answer_of, run, trials_of
from tests.explorer.search.small import REPORT, candidate, know, small_request, small_state
from tests.explorer.simulator import SimulatedDevice


def points_of(state: Posterior) -> Points:
    return Points([params_of(each) for each in state.table.candidates])


class Proposes(optuna.samplers.RandomSampler):
    """Proposes fixed points, one after another, the last again and again."""

    def __init__(self, points: list[Params]) -> None:
        super().__init__(seed=0)
        self.left = points
        self.seen: list[optuna.trial.FrozenTrial] = []

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        self.seen = [t for t in study.trials if t.number != trial.number]
        value = self.left[0][param_name]
        if param_name == "attention" and len(self.left) > 1:  # the last of them with a choice
            self.left.pop(0)
        return value


def proposing(points: list[Params], most: int = 3) -> tuple[Posterior, TrialStudy, Proposes]:
    inner = Proposes(points)
    state = small_state(sampler="random")
    sampler = StockCandidateSampler(state, points_of(state), StockSampler(lambda seed: inner, most))
    return state, TrialStudy(sampler, ()), inner


def point(size: int, recompute: str = "none", attention: str = "cudnn") -> Params:
    return {"micro_batch_size": size, "recompute": recompute, "attention": attention}


def test_the_default_sampler_takes_the_measurement_with_the_highest_gain() -> None:
    state = small_state()
    know(state, candidate(1))
    asked = TrialStudy(BexpSampler(SearchStages(state, candidate(), ()), points_of(state)), ()).ask()
    expected = suggest_measurement(state)
    assert asked is not None
    assert asked.suggestion == expected


def test_a_legal_proposal_is_taken_with_all_that_is_missing_of_it() -> None:
    state, study, _ = proposing([point(4)])
    asked = study.ask()
    assert asked is not None
    assert state.table.candidates[asked.suggestion.row] == candidate(4)
    assert asked.suggestion.components == state.missing(asked.suggestion.row)
    assert asked.suggestion.reason == "Proposes"


def test_a_candidate_that_was_tried_is_drawn_again_and_then_the_nearest_takes_its_place() -> None:
    state, study, inner = proposing([point(4)])
    first = study.ask()
    assert first is not None
    inner.left = [point(4), point(4), point(1)]
    second = study.ask()
    assert second is not None
    chosen = [state.table.candidates[a.suggestion.row] for a in (first, second)]
    assert chosen == [candidate(4), candidate(1)], "the third of three proposals"
    inner.left = [point(3)]
    third = study.ask()
    assert third is not None
    assert state.table.candidates[third.suggestion.row] == candidate(2), "the nearest size, with nothing else changed"


def test_a_rejected_candidate_is_never_suggested() -> None:
    state, study, _ = proposing([point(4)])
    state.knowledge.reject(candidate(4), "no")
    asked = study.ask()
    assert asked is not None
    assert state.table.candidates[asked.suggestion.row] == candidate(2)


def test_distances_count_octaves_of_sizes_and_changes_elsewhere() -> None:
    state, _, _ = proposing([])
    sampler = StockCandidateSampler(state, points_of(state), STOCK_SAMPLERS["random"])
    one, full = candidate(1), candidate(1, recompute=Recompute.FULL)
    others = [one, candidate(2), candidate(4), full, candidate(2, attention_backend="flash")]
    found = [sampler._distance(params_of(one), params_of(each)) for each in others]
    assert found == [0.0, 0.5, 1.0, 1.0, 1.5]


@pytest.mark.parametrize("name", ["tpe", "gp"])
def test_a_resumed_search_goes_the_way_it_would_have_gone(name: str) -> None:
    req = small_request(sampler=name, verify=False, budget={"max_trials": 13, "confidence_target": 99}, seed=3)
    whole = run(req, SimulatedDevice(req, noise=0.0), rep=REPORT)
    trials = trials_of(whole)
    assert len(trials) > 4
    for kept in (1, 3, len(trials) - 2):
        after = run(req, SimulatedDevice(req, noise=0.0), rep=REPORT, history=trials[:kept])
        assert [t.measurement for t in trials[:kept] + trials_of(after)] == [t.measurement for t in trials]
        best = answer_of(whole).recommendation
        assert best is not None
        assert best.confidence == answer_of(after).recommendation.confidence  # type: ignore[union-attr]  # not None


def test_seeds_lead_to_different_searches() -> None:
    orders = set()
    for seed in range(3):
        req = small_request(sampler="random", verify=False, budget={"confidence_target": 99}, seed=seed)
        orders.add(tuple(t.candidate for t in trials_of(run(req, SimulatedDevice(req, noise=0.0), rep=REPORT))))
    assert len(orders) > 1


def test_each_name_makes_its_sampler() -> None:
    state = small_state()
    stages = SearchStages(state, candidate(), ())
    assert isinstance(make_sampler("bexp", stages, points_of(state)), BexpSampler)
    made = {name: type(STOCK_SAMPLERS[name].make(1)).__name__ for name in STOCK_SAMPLERS}
    assert made == {"tpe": "TPESampler", "gp": "GPSampler", "random": "RandomSampler"}
    assert isinstance(make_sampler("tpe", stages, points_of(state)), StockCandidateSampler)
