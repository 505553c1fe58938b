"""The bytes that candidates need, and which of them fit."""

from __future__ import annotations

import numpy as np
import pytest

from bexp.explorer.cost.step import required_bytes
from bexp.explorer.search.candidate_memory import (
    MOST_DEVIATIONS,
    CandidateMemory,
)
from bexp.explorer.search.posterior import Posterior
from tests.explorer.search.small import candidate, know, small_state

ROWS = np.arange(12)


def memory_of(state: Posterior, limit: int = 2**40, peaks: dict[int, int] | None = None) -> CandidateMemory:
    return CandidateMemory(state.table, state.surrogate, state.hardware, limit, peaks)


def test_measured_bytes_replace_predicted_ones_and_leave_the_prediction() -> None:
    state = small_state()
    row = state.table.row[candidate(4)]
    before = memory_of(state).expected_bytes(row)
    know(state, candidate(4))  # the device needs 1.1 times the predicted activations
    after = memory_of(state)
    assert after.expected_bytes(row).parts.activations == pytest.approx(1.1 * before.parts.activations, rel=1e-3)
    assert after.expected_bytes(row).parts.transient == pytest.approx(1.1 * before.parts.transient, rel=1e-3)
    assert after.predicted_bytes(row) == before


def test_a_candidate_fits_up_to_the_limit_and_not_a_byte_beyond() -> None:
    state = small_state()
    row = state.table.row[candidate(4)]
    need = float(memory_of(state).required_C[row])
    assert memory_of(state, int(np.ceil(need))).fits_C[row]
    assert not memory_of(state, int(np.floor(need)) - 1).fits_C[row]
    exact = CandidateMemory(state.table, state.surrogate, state.hardware, need)  # type: ignore[arg-type]  # exact, no int
    assert exact.fits_C[row]


def worst_need(state: Posterior, row: int, deviations: float) -> float:
    """What a candidate needs if its least certain component's relative error is that many standard deviations."""
    memory, table = memory_of(state), state.table
    std = max(float(state.surrogate.bytes_std_K[table.column[c]]) for c in table.decompositions[row].components)
    activations = float(memory.saved_C[row] + memory.transient_C[row]) * np.exp(deviations * std)
    peak = float(table.static_bytes_C[row]) + activations
    return required_bytes(round(peak), state.hardware, state.request.allocator)


def test_memory_is_tight_where_four_deviations_more_would_not_fit() -> None:
    state = small_state()
    row = state.table.row[candidate(4)]
    need = worst_need(state, row, 4.0)
    assert need > worst_need(state, row, 3.5) + 10**6
    assert memory_of(state, round(need) - 10).is_tight(np.array([row])).tolist() == [True]
    assert memory_of(state, round(need) + 10).is_tight(np.array([row])).tolist() == [False]
    assert MOST_DEVIATIONS == 4.0


def test_a_candidate_that_is_measured_in_full_is_not_in_doubt() -> None:
    state = small_state()
    know(state, candidate(4))
    row = state.table.row[candidate(4)]
    need = memory_of(state).required_C[row]
    assert not memory_of(state, int(need) + 1).is_tight(np.array([row]))[0]
    assert memory_of(state, int(need) - 1).is_tight(np.array([row]))[0]


def test_a_sample_scales_the_bytes_of_every_candidate_alike() -> None:
    state = small_state()
    row = state.table.row[candidate(4)]
    limit = round(worst_need(state, row, 1.0))
    found = memory_of(state, limit).sample_fits(np.array([row]), np.array([-1.0, 0.0, 0.99, 1.01, 2.0]))
    assert found[:, 0].tolist() == [True, True, True, False, False]
    assert memory_of(state, limit).sample_fits(ROWS, np.zeros(3)).shape == (3, 12)


def test_a_whole_model_that_needs_less_than_composed_fits_and_one_that_needs_more_does_not() -> None:
    state = small_state()
    know(state, candidate(4), candidate(2))
    row, other = state.table.row[candidate(4)], state.table.row[candidate(2)]
    peak, need = memory_of(state).expected_bytes(row).peak, float(memory_of(state).required_C[row])
    limit = round(need) - 10**6
    fitting = memory_of(state, limit, {row: round(0.95 * peak)})
    assert fitting.fits_C[row]
    assert fitting.required_C[row] == required_bytes(round(0.95 * peak), state.hardware, state.request.allocator)
    too_large = memory_of(state, limit, {row: peak})
    assert not too_large.fits_C[row] and not too_large.may_fit_C[row]
    assert too_large.may_fit_C[other]
