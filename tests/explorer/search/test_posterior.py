"""What the state learns, once each, and what it would recommend."""

from __future__ import annotations

import pytest

from tests.explorer.search.small import measure, small_state


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
