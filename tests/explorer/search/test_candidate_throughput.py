"""The throughput of candidates: composed, and corrected by whole models."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bexp.explorer.search.candidate_throughput import FEWEST_SAMPLES, MOST_DRAWS, NUM_SAMPLES, CandidateThroughput
from bexp.explorer.search.posterior import Posterior
from bexp.explorer.surrogate.whole_model_error import CompositionErrors
from bexp.explorer.surrogate.whole_model_runs import WholeModelRun
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


def test_a_step_is_its_blocks_as_often_as_they_run_and_the_optimizer() -> None:
    state = known_state()
    row = state.table.row[candidate(4)]
    seconds = {
        c.kind.value: float(state.surrogate.device_mean_K[state.table.column[c]])
        for c in state.table.decompositions[row].components
    }
    micro_step = seconds["embedding"] + seconds["head"] + 2 * (seconds["attention"] + seconds["dense_ffn"])
    found = throughput(state).seconds(row, state.request)
    assert found.micro_step == pytest.approx(micro_step)
    assert found.optimizer == pytest.approx(seconds["optimizer"])
    assert found.step == pytest.approx(12 / 4 * micro_step + seconds["optimizer"])
    assert found.communication == 0.0
    assert found.tokens_per_second == pytest.approx(12 * 512 / found.step)
    assert throughput(state).mean_C[row] == pytest.approx(found.tokens_per_second)


def test_without_whole_models_nothing_is_corrected() -> None:
    state = known_state()
    found = throughput(state)
    assert found.scale == 1.0
    assert not found.shift_C.any()
    row = state.table.row[candidate(2)]
    assert found.corrected_seconds(row, state.request) == found.seconds(row, state.request)


def test_a_whole_model_shifts_every_candidate_about_as_much() -> None:
    state = known_state()
    row, other = state.table.row[candidate(2)], state.table.row[candidate(1, recompute="full")]
    composed = throughput(state).seconds(row, state.request)
    slower = WholeModelRun(math.log(0.9 * composed.tokens_per_second), 1e-4)
    found = throughput(state, **{f"row{row}": slower})
    assert found.shift_C[row] == pytest.approx(math.log(0.9), abs=0.01)
    assert found.shift_C[other] == pytest.approx(found.shift_C[row], abs=0.02)
    assert found.scale > 1.0, "ten percent is more than was expected"
    plain, corrected = found.seconds(row, state.request), found.corrected_seconds(row, state.request)
    factor = math.exp(-found.shift_C[row])
    assert plain == composed
    assert corrected.micro_step == pytest.approx(factor * plain.micro_step)
    assert corrected.optimizer == pytest.approx(factor * plain.optimizer)
    assert corrected.step == pytest.approx(factor * plain.step)
    assert corrected.communication == pytest.approx(factor * plain.communication)
    assert corrected.tokens_per_second == pytest.approx(plain.tokens_per_second / factor)
    assert found.mean_C[row] == pytest.approx(corrected.tokens_per_second)


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


@pytest.mark.parametrize(
    ("rows", "number"),
    [
        (MOST_DRAWS // NUM_SAMPLES, NUM_SAMPLES),
        (MOST_DRAWS // NUM_SAMPLES * 2, NUM_SAMPLES // 2),
        (MOST_DRAWS // FEWEST_SAMPLES * 2, FEWEST_SAMPLES),
    ],
)
def test_the_more_candidates_are_left_the_fewer_samples_are_drawn(
    rows: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = small_state()
    asked: list[int] = []

    def count(device_NK: np.ndarray, *_: object) -> np.ndarray:
        asked.append(len(device_NK))
        return np.ones((len(device_NK), 1))

    found = throughput(state)
    monkeypatch.setattr(state.table, "tokens_per_second", count)
    found._log_composed(np.zeros(rows, dtype=np.int64))
    assert set(asked) == {number}
    assert (NUM_SAMPLES, FEWEST_SAMPLES, MOST_DRAWS) == (256, 64, 1 << 20)
