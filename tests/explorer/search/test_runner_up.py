"""Which candidate is run whole beside the recommended one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bexp.explorer.search.posterior import Posterior
from bexp.explorer.search.whole_models import MOST_WHOLE_RUNS, find_above_limit, find_runner_up
from tests.explorer.search.small import candidate, contend, know, small_state


def found_by(state: Posterior) -> tuple[Any, ...] | None:
    found = find_runner_up(state)
    return None if found is None else (found.row, found.probability, found.gain)


def test_the_runner_up_is_the_candidate_that_is_expected_to_gain_most() -> None:
    state = small_state()
    know(state, candidate(1), candidate(2), candidate(4))
    tokens = np.tile([100.0, 100.2, 99.0], (10, 1))
    tokens[:3, 2] = 100.3
    contend(state, tokens, mean_A=np.array([101.0, 100.2, 99.4]))
    rows = state.contenders.rows
    assert found_by(state) == (rows[1], 0.0, pytest.approx(0.002))
    state.knowledge.whole_models._by_trial = {int(rows[1]): {1: (1.0, 0.0)}}
    assert found_by(state) == (rows[0], 0.0, pytest.approx(0.002)), "of two, what ran less often is run next"
    state.knowledge.whole_models._by_trial = {int(row): {1: (1.0, 0.0)} for row in rows}
    assert found_by(state) == (rows[1], 0.0, pytest.approx(0.002)), "their difference may be noise"
    state.knowledge.whole_models._by_trial = {int(rows[1]): dict.fromkeys(range(MOST_WHOLE_RUNS), (1.0, 0.0))}
    assert found_by(state) == (rows[2], 0.3, pytest.approx(0.0009)), "what was run whole so often is not run again"
    state.knowledge.whole_models._by_trial = {}
    state._contenders = replace(state.contenders, clear_A=np.array([True, False, False]))
    assert found_by(state) == (rows[1], 0.0, pytest.approx(0.002)), "a whole model tells what is not measured"
    state._contenders = replace(state.contenders, clear_A=np.array([False, False, False]))
    assert found_by(state) == (rows[1], 1.0, 1.0), "nothing else can be recommended"
    state.knowledge.whole_models._by_trial = {int(row): {1: (1.0, 0.0)} for row in rows}
    assert find_runner_up(state) is None


def test_of_runner_ups_that_are_worth_it_the_one_that_gains_most_for_its_seconds_is_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = small_state()
    know(state, candidate(1), candidate(2), candidate(4))
    contend(state, np.tile([100.0, 101.0, 100.4], (10, 1)), mean_A=np.array([102.0, 101.0, 100.4]))
    rows = state.contenders.rows
    seconds = {int(rows[0]): 1.0, int(rows[1]): 30.0, int(rows[2]): 5.0}
    monkeypatch.setattr(state, "whole_model_seconds", seconds.__getitem__)

    def chosen(least_gain: float) -> int:
        found = find_runner_up(state, least_gain)
        assert found is not None
        return found.row

    assert chosen(0.0) == rows[2]
    assert chosen(0.006) == rows[1], "the other gains too little"
    assert chosen(0.02) == rows[2], "both do"


def test_above_the_limit_the_chance_to_fit_and_the_gain_if_it_does_decide() -> None:
    state = small_state()
    know(state, candidate(1), candidate(2), candidate(4))
    clear, mean = np.array([True, False, False]), np.array([100.0, 150.0, 110.0])
    samples = np.tile([100.0, 0.0, 0.0], (10, 1))
    contend(state, samples, mean_A=mean, clear_A=clear, undecided_A=~clear, runs_A=clear.astype(float))
    rows = state.contenders.rows
    state.memory.chance_C[rows] = [1.0, 0.001, 0.02]
    found = find_above_limit(state)
    assert found is not None
    assert [found.row, found.probability, found.gain] == pytest.approx([rows[2], 0.02, 0.002])
    state.memory.chance_C[rows[2]] = 0.004
    found = find_above_limit(state)
    assert found is not None
    assert [found.row, found.probability, found.gain] == pytest.approx([rows[1], 0.001, 0.0005])
    none = np.zeros(3, dtype=np.bool_)
    state._contenders = replace(state.contenders, clear_A=none)
    assert find_above_limit(state) is None, "nothing can be recommended"
    state._contenders = replace(state.contenders, clear_A=~none, undecided_A=none)
    assert find_above_limit(state) is None, "nothing is in doubt"
