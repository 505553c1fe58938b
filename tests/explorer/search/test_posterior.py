"""What the state learns, once each, and what it would recommend."""

from __future__ import annotations

import math

import pytest

from bexp.explorer.dimensions.recompute import Recompute
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
