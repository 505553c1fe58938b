"""How a suggestion is split, and what measuring it costs."""

from __future__ import annotations

import numpy as np
import pytest

from bexp.explorer.search.suggestion import Suggestion, measuring_seconds, split_suggestion
from tests.explorer.search.small import small_state


def test_a_measurement_costs_its_set_up_and_eight_passes() -> None:
    assert measuring_seconds(np.array([0.0, 0.1, 1.0])) == pytest.approx([0.15, 0.95, 8.15])


def test_the_longest_component_goes_to_the_shortest_part() -> None:
    state = small_state()
    components = state.missing(0)[:4]
    columns = [state.table.column[c] for c in components]
    state.surrogate.device_mean_K[columns] = [1.0, 4.0, 3.0, 2.5]
    first, second = split_suggestion(Suggestion(0, components), 2, state.table, state.surrogate)
    assert first.components == (components[0], components[1])
    assert second.components == (components[2], components[3])
