"""What the state learns, once each, and what it would recommend."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from bexp.explorer.records.measurement import CONTAMINATED_ATTEMPTS, Conditions, Measurement, Outcome
from bexp.explorer.search.posterior import LEAST_SHARE, Posterior
from bexp.explorer.search.suggestion import Suggestion
from bexp.explorer.spec.candidate import Recompute
from tests.explorer.search.small import candidate, know, measure, small_state


def test_the_order_of_trials_does_not_matter() -> None:
    found = []
    for order in ((1, 2, 4), (4, 1, 2)):
        state = small_state()
        for size in order:
            row = state.table.row[candidate(size)]
            state.knowledge.learn(size, measure(state, state.table.decompositions[row].components, candidate(size)))
        found.append(state)
    assert np.array_equal(found[0].mean_tokens_per_second(), found[1].mean_tokens_per_second())
    assert found[0].recommend() == found[1].recommend()


def test_the_fastest_known_candidate_is_recommended_with_its_confidence() -> None:
    state = small_state()
    assert state.recommend() is None
    know(state, candidate(1), candidate(4))
    best = state.recommend()
    assert best is not None
    assert state.table.candidates[best.row] == candidate(4)
    position = state.contenders.incumbent
    assert position is not None
    assert best.confidence == state.contenders.confidence(position, state.request.tolerance)


@pytest.mark.parametrize("too_large", [False, True])
def test_what_is_rejected_is_not_recommended(too_large: bool) -> None:
    state = small_state()
    know(state, candidate(1), candidate(2), candidate(4))
    state.knowledge.reject(candidate(2), "no", too_large=too_large)
    best = state.recommend()
    assert best is not None
    assert state.table.candidates[best.row] == candidate(1 if too_large else 4)
    assert not state.is_open(state.table.row[candidate(2)])
    assert state.is_open(state.table.row[candidate(4)]) is not too_large


def test_only_legal_rows_are_recommended() -> None:
    every = small_state()
    legal = [c for c in every.table.candidates if c.micro_batch_size < 4]
    state = Posterior.of(every.table, legal, every.request, every.hardware)
    know(state, candidate(2), candidate(4))
    best = state.recommend()
    assert best is not None
    assert state.table.candidates[best.row] == candidate(2)
    assert state.known_rows().tolist() == [state.table.row[candidate(2)]]
    assert all(state.table.candidates[row] in legal for row in state.open_rows())


def test_known_rows_fit() -> None:
    need = small_state()
    know(need, candidate(1), candidate(4))
    limit = (need.bytes(need.table.row[candidate(4)]).required - 1) / 2**30
    state = small_state(memory_limit_gib=limit)
    if candidate(4) in state.table.row:
        know(state, candidate(1), candidate(4))
        assert not state.fits(state.table.row[candidate(4)])
        assert state.table.row[candidate(4)] not in state.known_rows()
        best = state.recommend()
        assert best is None or state.table.candidates[best.row] != candidate(4)


def test_a_whole_model_corrects_what_is_composed() -> None:
    state = small_state()
    know(state, candidate(1), candidate(4))
    for size in (1, 4):  # second runs show that the blocks have no noise
        components = state.table.decompositions[state.table.row[candidate(size)]].components
        state.knowledge.learn(100 + size, measure(state, components, candidate(size)))
    row = state.table.row[candidate(4)]
    composed = state.seconds(row)
    assert state.corrected_seconds(row).step == pytest.approx(composed.step)
    assert not state.knowledge.whole_models.was_run(row)
    state.knowledge.learn_whole_model(candidate(4), 0.9 * composed.tokens_per_second, 0.001)
    corrected = state.corrected_seconds(row)
    assert state.knowledge.whole_models.was_run(row)
    assert corrected.tokens_per_second == pytest.approx(0.9 * composed.tokens_per_second, rel=0.02)
    for name in ("step", "micro_step", "optimizer"):
        ratio = getattr(corrected, name) / getattr(composed, name)
        assert ratio == pytest.approx(composed.tokens_per_second / corrected.tokens_per_second)
    assert state.seconds(row) == composed


def test_candidates_that_cannot_reach_97_percent_of_the_best_are_no_contenders() -> None:
    assert LEAST_SHARE == 0.97
    state = small_state()
    know(state, *(c for c in state.table.candidates if c.attention_backend == "cudnn"))
    best = state.mean_tokens_per_second()[state.known_rows()].max()
    for row in state.known_rows():
        share = state.mean_tokens_per_second()[row] / best
        if share < 0.9:
            assert row not in state.contenders.rows
        if share > 0.98:
            assert row in state.contenders.rows


def test_components_of_other_variants_are_learnt_where_they_are_in_common() -> None:
    state, other = small_state(), small_state()
    row = state.table.row[candidate(1)]
    components = measure(state, state.missing(row), candidate(1)).components
    foreign = components[0].model_copy(
        update={"component": components[0].component.model_copy(update={"micro_batch_size": 77})}
    )
    state.knowledge.learn_shared(0, (*components, foreign))
    know(other, candidate(1))
    assert state.is_known(row)
    assert set(state.knowledge.measured) == set(other.knowledge.measured)


def contaminated(state: Posterior, of_row: int, number: int) -> Measurement:
    component = state.table.decompositions[of_row].components[1]
    found = measure(state, (component,), state.table.candidates[of_row])
    shared = found.components[0].model_copy(update={"conditions": Conditions(foreign_processes=1)})
    return found.model_copy(update={"components": (shared,), "outcome": Outcome.CONTAMINATED})


def test_a_component_that_stays_contaminated_rules_its_candidates_out() -> None:
    assert CONTAMINATED_ATTEMPTS == 3
    state = small_state()
    for number in range(3):
        assert state.is_open(0)
        state.knowledge.learn(number, contaminated(state, 0, number))
    assert not state.is_open(0)


def test_attempts_count_contaminated_runs_and_what_is_in_flight() -> None:
    state = small_state()
    component = state.table.decompositions[0].components[1]
    assert state.count_attempts(component) == 0
    state.knowledge.learn(0, contaminated(state, 0, 0))
    state.knowledge.learn(1, measure(state, (component,), candidate(1)))
    assert state.count_attempts(component) == 2
    assert state.expecting_pending() is state
    state.knowledge.expect(7, Suggestion(0, (component,)))
    expecting = state.expecting_pending()
    assert expecting.count_attempts(component) == sys.maxsize
    assert state.count_attempts(component) == 2


def test_predictions_of_bytes_stay_what_they_were_before_anything_was_measured() -> None:
    state = small_state()
    row = state.table.row[candidate(4)]
    before = state.memory.predicted_bytes(row)
    assert state.bytes(row) == before
    know(state, candidate(4))
    assert state.memory.predicted_bytes(row) == before
    assert state.bytes(row).peak > before.peak, "the device takes a tenth more than predicted"
    full = state.table.row[candidate(4, recompute=Recompute.FULL)]
    assert state.bytes(full).peak < state.bytes(row).peak
    assert math.isfinite(state.seconds(full).step)
