"""The bytes that candidates need, and which of them fit."""

from __future__ import annotations

import numpy as np
import pytest

from bexp.explorer.cost_model.step import FRAGMENTATION, MARGIN_BYTES, required_bytes
from bexp.explorer.search.candidate_memory import (
    FRAGMENTATION_BYTES,
    HELD_SHARE,
    MOST_DEVIATIONS,
    CandidateMemory,
    MemoryErrors,
)
from bexp.explorer.search.posterior import Posterior
from tests.explorer.search.small import candidate, know, small_state

ROWS = np.arange(12)


def memory_of(state: Posterior, limit: int = 2**40, peaks: dict[int, int] | None = None) -> CandidateMemory:
    return CandidateMemory(state.table, state.surrogate, state.hardware, limit, peaks)


def test_a_candidate_needs_its_training_state_and_its_activations() -> None:
    state = small_state()
    memory, row = memory_of(state), state.table.row[candidate(4)]
    found = memory.expected_bytes(row)
    assert found.parts.activations == round(memory.saved_C[row]) > 0
    assert found.parts.transient == round(memory.transient_C[row]) > 0
    static = state.table.static_parts(row).total
    assert found.peak == static + found.parts.activations + found.parts.transient
    assert found.required == required_bytes(found.peak, state.hardware, state.request.allocator)
    assert memory.required_C[row] == pytest.approx(found.required, abs=2)


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


def test_a_whole_model_within_the_error_of_the_limit_may_not_run() -> None:
    state = small_state()
    know(state, candidate(4))
    rows = np.array([state.table.row[candidate(4)]])
    need = float(memory_of(state).required_C[rows[0]])
    errors = MemoryErrors(len(state.table.candidates), 2000, np.random.default_rng(0))
    shares = [memory_of(state, round(room * need)).sample_runs(rows, errors, 2000).mean() for room in (1.0, 1.02, 1.2)]
    assert 0.3 < shares[0] < shares[1] < 1.0
    assert shares[2] > 0.999
    assert memory_of(state, round(1.02 * need)).is_near_limit(rows)[0]
    assert not memory_of(state, round(1.5 * need)).is_near_limit(rows)[0]


def runs(memory: CandidateMemory, row: int) -> float:
    errors = MemoryErrors(len(ROWS), 2000, np.random.default_rng(0))
    return float(memory.sample_runs(np.array([row]), errors, 2000).mean())


def test_a_candidate_above_the_limit_may_fit_within_the_error_of_its_peak() -> None:
    state = small_state()
    know(state, candidate(4))
    row = state.table.row[candidate(4)]
    need = float(memory_of(state).required_C[row])
    peak = memory_of(state).expected_bytes(row).peak
    shares = []
    for error in (0.001, 0.01, 0.2):
        over = peak * (1 - np.exp(-error)) * (1 + FRAGMENTATION[state.request.allocator])
        memory = memory_of(state, round(need - over))
        assert not memory.fits_C[row]
        shares.append((bool(memory.may_fit_C[row]), runs(memory, row)))
    assert [may for may, _ in shares] == [True, True, False]
    assert 0.2 < shares[0][1] < 0.45
    assert shares[0][1] > shares[1][1] > 0.01 > shares[2][1]


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


def test_the_error_of_a_peak_explains_a_whole_model_out_of_memory_only_near_the_limit() -> None:
    state = small_state()
    know(state, candidate(4), candidate(2))
    row = state.table.row[candidate(4)]
    peak = memory_of(state).expected_bytes(row).peak

    def after(limit: int, *too_large: int) -> CandidateMemory:
        return CandidateMemory(state.table, state.surrogate, state.hardware, limit, None, too_large)

    held = state.hardware.context_bytes + HELD_SHARE * MARGIN_BYTES[state.hardware.device_kind]
    limit = round(peak + held + 0.01 * FRAGMENTATION_BYTES)
    assert after(limit, row).explained == {row}
    assert not after(2 * limit, row).explained, "half the memory is no error of the peak"


def test_the_peak_of_one_whole_model_moves_the_expectation_of_the_others() -> None:
    state = small_state()
    know(state, candidate(4), candidate(2))
    row, other = state.table.row[candidate(4)], state.table.row[candidate(2)]
    peak = memory_of(state).expected_bytes(other).peak
    limit = round(float(memory_of(state).required_C[row]))
    lower, unknown, higher = (
        runs(memory_of(state, limit, peaks), row)
        for peaks in ({other: round(0.97 * peak)}, None, {other: round(1.03 * peak)})
    )
    assert lower > unknown + 0.1 and unknown > higher + 0.1
