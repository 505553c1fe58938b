"""The throughput of candidates: composed, and corrected by whole models."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bexp.explorer.search.candidate_throughput import NUM_SAMPLES, CandidateThroughput
from bexp.explorer.search.posterior import Posterior
from bexp.explorer.surrogate.whole_model_error import CompositionErrors, WholeModelRun
from tests.explorer.search.small import candidate, know, small_state


def errors_of(state: Posterior) -> CompositionErrors:
    return CompositionErrors(state.table.candidates, "cuda", 0, NUM_SAMPLES, np.random.default_rng(0))


def throughput(state: Posterior, **whole: WholeModelRun) -> CandidateThroughput:
    runs = {int(name.removeprefix("row")): run for name, run in whole.items()}
    return CandidateThroughput(state.table, state.surrogate, errors_of(state), runs)


def known_state(**changes: object) -> Posterior:
    state = small_state(batch_size=12, **changes)
    know(state, *(candidate(size) for size in (1, 2, 4)))
    return state


def test_without_whole_models_nothing_is_corrected() -> None:
    state = known_state()
    found = throughput(state)
    assert found.scale == 1.0
    assert not found.shift_C.any()
    row = state.table.row[candidate(2)]
    assert found.corrected_seconds(row, state.request) == found.seconds(row, state.request)


def test_samples_are_of_the_composition_and_then_with_its_error() -> None:
    state = known_state()
    rows = np.array([state.table.row[candidate(size)] for size in (1, 2, 4)])
    found = throughput(state)
    composed_NA, tokens_NA = found.sample_logs(rows)
    assert composed_NA.shape == tokens_NA.shape == (NUM_SAMPLES, 3)
    direct = state.table.tokens_per_second(state.surrogate.device_NK, state.surrogate.host_K, rows)
    assert composed_NA == pytest.approx(np.log(direct))
    assert tokens_NA - composed_NA == pytest.approx(errors_of(state).sample(NUM_SAMPLES, rows))


def test_after_a_whole_model_samples_lie_about_the_corrected_mean() -> None:
    state = known_state()
    row = state.table.row[candidate(2)]
    run = WholeModelRun(math.log(0.97 * throughput(state).mean_C[row]), 1e-4)
    found = throughput(state, **{f"row{row}": run})
    composed_NA, tokens_NA = found.sample_logs(np.array([row]))
    assert tokens_NA.mean() == pytest.approx(math.log(found.mean_C[row]), abs=0.004)
    assert composed_NA.mean() == pytest.approx(math.log(found.mean_C[row]), abs=0.004)
    assert tokens_NA.std() < 0.01 < throughput(state).sample_logs(np.array([row]))[1].std()


def test_a_larger_surprise_widens_the_samples_of_other_candidates() -> None:
    state = known_state()
    row, other = state.table.row[candidate(2)], np.array([state.table.row[candidate(4, recompute="full")]])
    mean = math.log(throughput(state).mean_C[row])
    calm, surprised = (throughput(state, **{f"row{row}": WholeModelRun(mean + by, 1e-4)}) for by in (0.0, 0.3))
    assert surprised.scale > 1.5 * calm.scale
    spread = [(np.subtract(*found.sample_logs(other)[::-1])).std() for found in (calm, surprised)]
    assert spread[1] > 1.5 * spread[0]
