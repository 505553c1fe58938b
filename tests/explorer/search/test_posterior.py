"""What the state learns, once each, and what it would recommend."""

from __future__ import annotations

import math

import pytest

from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.records.measurement import CONTAMINATED_ATTEMPTS, Conditions, Measurement, Outcome
from bexp.explorer.search.posterior import Posterior
from tests.explorer.search.small import candidate, know, measure, small_state


def test_the_order_of_trials_does_not_matter() -> None:
    found = []
    for order in ((0, 3, 6, 7), (7, 6, 3, 0)):
        state = small_state()
        for row in order:
            components = state.table.decompositions[row].components
            state.knowledge.learn(row, measure(state, components, state.table.candidates[row]))
        found.append(state)
    first, second = found
    assert second.surrogate.host_K == pytest.approx(first.surrogate.host_K)
    assert second.mean_tokens_per_second() == pytest.approx(first.mean_tokens_per_second())
    best, again = first.recommend(), second.recommend()
    assert best is not None and again is not None
    assert again.row == best.row
    assert again.confidence == pytest.approx(best.confidence)


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
