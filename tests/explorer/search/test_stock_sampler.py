"""Optuna's own samplers see legal candidates alone, and suggest the same after a resume."""

from __future__ import annotations

from typing import Any

import numpy as np
import optuna
import pytest

from bexp.explorer.records.trial import Trial, TrialKind
from bexp.explorer.search.candidate_study import CandidateStudy, make_sampler
from bexp.explorer.search.optuna_sampler import ComponentSampler
from bexp.explorer.search.stock_sampler import STOCK_SAMPLERS, StockCandidateSampler, StockSampler, _Grid
from bexp.explorer.spec.candidate import Recompute
from tests.explorer.explorations import answer_of, run, trials_of
from tests.explorer.search.small import REPORT, candidate, measure, small_request, small_state
from tests.explorer.simulator import SimulatedDevice


class Proposes(optuna.samplers.RandomSampler):
    """Proposes fixed points, one after another, the last again and again."""

    def __init__(self, points: list[dict[str, int]]) -> None:
        super().__init__(seed=0)
        self.left = points
        self.seen: list[optuna.trial.FrozenTrial] = []

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        self.seen = [t for t in study.trials if t.number != trial.number]
        value = self.left[0][param_name]
        if param_name == "attention_backend" and len(self.left) > 1:  # the last dimension
            self.left.pop(0)
        return value


def proposing(points: list[dict[str, int]], most: int = 3, **changes: Any) -> tuple[CandidateStudy, Proposes]:
    inner = Proposes(points)
    state = small_state(sampler="random", **changes)
    return CandidateStudy(state, StockCandidateSampler(state, StockSampler(lambda seed: inner, most)), ()), inner


def point(size: int, recompute: int = 1, attention: int = 0) -> dict[str, int]:
    """Places in the grid; of recomputation `full` comes before `none`."""
    return {"micro_batch_size": size, "recompute": recompute, "attention_backend": attention}


def observe(study: CandidateStudy, asked: Any, number: int) -> Trial:
    state = study._state
    of = state.table.candidates[asked.suggestion.row]
    found = measure(state, asked.suggestion.components, of)
    study.observe(asked, number, found)
    made = Trial(number=number, kind=TrialKind.COMPONENTS, measurement=found, tokens_per_second=1000.0 + number)
    study.tell(asked, made)
    return made


def test_a_legal_proposal_is_taken_with_all_that_is_missing_of_it() -> None:
    study, _ = proposing([point(2)])
    asked = study.ask()
    assert asked is not None
    state = study._state
    assert state.table.candidates[asked.suggestion.row] == candidate(4)
    assert asked.suggestion.components == state.missing(asked.suggestion.row)
    assert asked.suggestion.reason == "Proposes"


def test_a_candidate_that_was_tried_is_drawn_again_and_then_the_nearest_takes_its_place() -> None:
    study, inner = proposing([point(2)])
    first = study.ask()
    assert first is not None
    inner.left = [point(2), point(2), point(0)]
    second = study.ask()
    assert second is not None
    chosen = [study._state.table.candidates[a.suggestion.row] for a in (first, second)]
    assert chosen == [candidate(4), candidate(1)], "the third of three proposals"
    inner.left = [point(2)]
    third = study.ask()
    assert third is not None
    assert study._state.table.candidates[third.suggestion.row] == candidate(2), (
        "one size away, with nothing else changed"
    )


def test_samplers_see_values_constraints_and_what_is_in_flight() -> None:
    study, inner = proposing([point(2)])
    asked = study.ask()
    assert asked is not None
    observe(study, asked, 0)
    inner.left = [point(1)]
    study.ask()
    inner.left = [point(0)]
    study.ask()
    assert [(t.state.name, t.value) for t in inner.seen] == [("COMPLETE", 1000.0), ("RUNNING", None)]
    assert inner.seen[0].params == point(2)
    assert all(v <= 0 for v in inner.seen[0].constraints.values())


def test_nothing_is_left_once_every_candidate_was_tried() -> None:
    study, inner = proposing([point(0)])
    for number in range(13):
        inner.left = [point(0)]
        asked = study.ask()
        if asked is None:
            break
        observe(study, asked, number)
    else:
        raise AssertionError("the sampler does not end")
    state = study._state
    assert all(state.is_known(int(row)) for row in state.open_rows())
    assert study.study.trials[-1].state is optuna.trial.TrialState.FAIL


def test_a_rejected_candidate_is_never_suggested() -> None:
    study, _ = proposing([point(2)])
    study._state.reject(candidate(4), "no")
    asked = study.ask()
    assert asked is not None
    assert study._state.table.candidates[asked.suggestion.row] == candidate(2)


def test_distances_count_places_where_values_have_an_order_and_changes_elsewhere() -> None:
    grid = _Grid(small_state().table.candidates)
    rows = [small_state().table.row[candidate(size)] for size in (1, 2, 4)]
    full = small_state().table.row[candidate(1, recompute=Recompute.FULL)]
    found = grid.distances(grid.points[rows[0]], [*rows, full])
    assert found.tolist() == [0.0, 0.5, 1.0, 1.0]
    assert set(grid.space) == {"micro_batch_size", "recompute", "attention_backend"}, "what has one value is left out"
    assert grid.space["micro_batch_size"] == optuna.distributions.IntDistribution(0, 2)
    assert grid.space["recompute"] == optuna.distributions.CategoricalDistribution(range(3))
    assert grid.to_params(rows[2])["micro_batch_size"] == 2
    assert np.array_equal(grid.to_point(grid.to_params(rows[2])), grid.points[rows[2]])


@pytest.mark.parametrize("name", ["tpe", "random", "gp"])
def test_a_resumed_search_goes_the_way_it_would_have_gone(name: str) -> None:
    req = small_request(sampler=name, verify=False, budget={"max_trials": 13, "confidence_target": 99}, seed=3)
    whole = run(req, SimulatedDevice(req, noise=0.0), rep=REPORT)
    trials = trials_of(whole)
    assert len(trials) > 4
    after = run(req, SimulatedDevice(req, noise=0.0), rep=REPORT, history=trials[:-2])
    assert [t.measurement for t in trials[:-2] + trials_of(after)] == [t.measurement for t in trials]
    found = answer_of(whole).recommendation
    assert found is not None
    assert found.confidence == answer_of(after).recommendation.confidence  # type: ignore[union-attr]  # not null


def test_seeds_lead_to_different_searches() -> None:
    orders = set()
    for seed in range(3):
        req = small_request(sampler="random", verify=False, budget={"confidence_target": 99}, seed=seed)
        orders.add(tuple(t.candidate for t in trials_of(run(req, SimulatedDevice(req, noise=0.0), rep=REPORT))))
    assert len(orders) > 1


def test_each_name_makes_its_sampler() -> None:
    state = small_state()
    assert isinstance(make_sampler("bexp", state), ComponentSampler)
    made = {name: type(STOCK_SAMPLERS[name].make(1)).__name__ for name in STOCK_SAMPLERS}
    assert made == {"tpe": "TPESampler", "gp": "GPSampler", "random": "RandomSampler"}
    assert isinstance(make_sampler("tpe", state), StockCandidateSampler)
