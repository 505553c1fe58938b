"""The bytes that candidates need, and which of them fit."""

from __future__ import annotations

import numpy as np

from bexp.explorer.cost.step import required_bytes
from bexp.explorer.search.candidate_memory import (
    CandidateMemory,
)
from bexp.explorer.search.posterior import Posterior
from tests.explorer.search.small import candidate, know, small_state


def memory_of(state: Posterior, limit: int = 2**40, peaks: dict[int, int] | None = None) -> CandidateMemory:
    return CandidateMemory(state.table, state.surrogate, state.hardware, limit, peaks)


def test_a_candidate_fits_up_to_the_limit_and_not_a_byte_beyond() -> None:
    state = small_state()
    row = state.table.row[candidate(4)]
    need = float(memory_of(state).required_C[row])
    assert memory_of(state, int(np.ceil(need))).fits_C[row]
    assert not memory_of(state, int(np.floor(need)) - 1).fits_C[row]
    exact = CandidateMemory(state.table, state.surrogate, state.hardware, need)  # type: ignore[arg-type]  # exact, no int
    assert exact.fits_C[row]


def test_a_candidate_that_is_measured_in_full_is_not_in_doubt() -> None:
    state = small_state()
    know(state, candidate(4))
    row = state.table.row[candidate(4)]
    need = memory_of(state).required_C[row]
    assert not memory_of(state, int(need) + 1).is_tight(np.array([row]))[0]
    assert memory_of(state, int(need) - 1).is_tight(np.array([row]))[0]


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
