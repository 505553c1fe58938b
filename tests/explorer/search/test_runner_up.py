"""Which candidate is run whole beside the recommended one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from explorer.search.runner_up import MATTERS, MOST_WHOLE_RUNS, find_runner_up
from explorer.search.search_state import SearchState
from explorer.search.whole_model_runs import WholeModelRuns
from tests.explorer.search.small import candidate, know, small_state


def found_by(state: SearchState) -> tuple[Any, ...]:
    found = find_runner_up(state)
    assert found is not None
    return found.row, found.probability, found.gain


def ran(state: SearchState, *rows: int, times: int = 1) -> None:
    state.whole_models = WholeModelRuns()
    for row in rows:
        for trial in range(times):
            state.whole_models.learn(row, trial, (1.0, 0.0), None)


def state_of(tokens: list[list[float]], clear: tuple[bool, ...] = (True, True, True)) -> SearchState:
    """The state in which candidates 1, 2 and 4 have these samples; the first has the highest expected throughput."""
    state = small_state()
    know(state, candidate(1), candidate(2), candidate(4))
    samples = np.array(tokens).T
    state.posterior = replace(
        state.posterior,
        rows=np.array([state.table.row[candidate(size)] for size in (1, 2, 4)]),
        mean_A=np.array([101.0, 100.2, 99.4]),
        tokens_NA=samples,
        composed_NA=samples,
        wanted_AP=np.zeros((3, state.table.used_CP.shape[1]), dtype=np.bool_),
        clear_A=np.array(clear),
        undecided_A=np.array([False, False, False]),
        runs_A=np.ones(3),
    )
    return state


def noise_of(state: SearchState, monkeypatch: pytest.MonkeyPatch, *std: float) -> None:
    monkeypatch.setattr(state, "next_run_std", lambda _: np.array(std))


def test_the_runner_up_is_the_candidate_that_is_expected_to_gain_most(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MATTERS == 0.25
    tokens = [[100.0] * 10, [100.2] * 10, [100.3] * 3 + [99.0] * 7]
    state = state_of(tokens)
    noise_of(state, monkeypatch, 0.0, 0.0, 0.0)
    rows = [int(row) for row in state.posterior.rows]
    assert found_by(state) == (rows[1], 0.0, pytest.approx(0.002))
    ran(state, *rows)
    assert found_by(state) == (rows[1], 0.0, pytest.approx(0.002)), "their difference may be noise"
    ran(state, rows[1], times=MOST_WHOLE_RUNS)
    assert found_by(state) == (rows[2], 0.3, pytest.approx(0.0009)), "what was run whole so often is not run again"
    ran(state)
    state.posterior = replace(state.posterior, clear_A=np.array([True, False, False]))
    assert found_by(state) == (rows[1], 0.0, pytest.approx(0.002)), "a whole model tells what is not measured"
    state.posterior = replace(state.posterior, clear_A=np.array([False, False, False]))
    assert found_by(state) == (rows[1], 1.0, 1.0), "nothing else can be recommended"
    ran(state, *rows)
    assert find_runner_up(state) is None


def test_a_run_gains_less_the_noisier_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of([[100.0] * 4, [99.0, 101.0] * 2, [90.0] * 4])
    gains = []
    for std in (0.0, 0.01, 0.03):
        noise_of(state, monkeypatch, 0.0, std, 0.0)
        gains.append(found_by(state)[2])
    told = [0.01 / np.hypot(0.01, std) for std in (0.0, 0.01, 0.03)]
    assert gains == pytest.approx([0.005 * share for share in told], rel=1e-3)


def test_the_recommended_candidate_is_run_again_where_that_tells_more(monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of([[99.0, 101.0] * 2, [100.0] * 4, [90.0] * 4])
    noise_of(state, monkeypatch, 0.001, 0.001, 0.001)
    rows = [int(row) for row in state.posterior.rows]
    assert found_by(state)[0] == rows[1], "it was never run"
    ran(state, *rows)
    assert found_by(state) == (rows[0], 0.5, pytest.approx(0.005, rel=0.01))
    noise_of(state, monkeypatch, 0.5, 0.001, 0.001)
    assert found_by(state)[2] < 0.0002, "noise hides it"
