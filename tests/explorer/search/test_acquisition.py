"""Which measurement is worth its seconds most."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bexp.explorer.search.posterior import Posterior
from bexp.explorer.search.samplers import NEGLIGIBLE, suggest_measurement
from tests.explorer.search.small import candidate, contend, know, small_state


def rival_pair(tokens: tuple[float, float], better: float, **changes: Any) -> Posterior:
    """Two candidates that are measured; in a share `better` of the samples the second beats the first by 2%."""
    state = small_state(**changes)
    know(state, candidate(1), candidate(2))
    samples = np.full((1000, 2), tokens[0])
    samples[:, 1] = np.where(np.arange(1000) < better * 1000, 1.02 * tokens[0], 0.9 * tokens[0])
    contend(state, samples, mean_A=np.array(tokens))
    state.surrogate.log_std_K[:] = 0.01
    return state


def with_an_unknown_rival(composed: float, whole: float) -> Posterior:
    """A measured candidate of 100 tokens/s, and one that is not measured, in every sample as fast as given."""
    state = rival_pair((100.0, 90.0), better=0.0)
    composed_NA, whole_NA = (np.tile([100.0, rival], (4, 1)) for rival in (composed, whole))
    contend(state, composed_NA, tokens_NA=whole_NA, clear_A=np.array([True, False]))
    state.contenders.wanted_AP[1, 0] = True
    return state


def with_costs(samples: list[list[float]], wanted: tuple[int, ...], *, known: int = 0) -> Posterior:
    """As many candidates as a sample has figures, of which the first `known` are clear.

    Each wants so many of its components, and a component takes 0.15 s to measure.
    """
    state = small_state()
    contend(state, samples, clear_A=np.arange(len(wanted)) < known)
    for each, count in zip(state.contenders.wanted_AP, wanted, strict=True):
        each[:count] = True
    state.surrogate.device_mean_K[:] = 0.0
    return state


def suggested(state: Posterior) -> tuple[int | None, int, str]:
    """The micro-batch of the suggested candidate, how many of its components, and why."""
    found = suggest_measurement(state)
    assert found is not None
    assert not found.again
    components = state.table.decompositions[found.row].components
    assert set(found.components) <= set(components)
    return state.table.candidates[found.row].micro_batch_size, len(found.components), found.reason


def test_before_anything_is_known_it_is_the_most_throughput_a_second() -> None:
    # 90 / 0.15 s = 600, 250 / 0.30 s = 833, 400 / 0.60 s = 667.
    state = with_costs([[90.0, 250.0, 400.0]], (1, 2, 4))
    assert suggested(state) == (2, 2, "expected improvement 62.50% for 0.30 s")
    # A component of the second takes 0.106 s a pass, of which there are eight: 250 / 1.15 s = 217.
    state.surrogate.device_mean_K[state.table.columns_CP[state.contenders.rows[1], 0]] = 0.10625
    assert suggested(state) == (4, 4, "expected improvement 100.00% for 0.60 s")


def test_a_new_candidate_is_the_one_with_the_highest_expected_improvement_a_second() -> None:
    # Over 100: 0 or 40 is 20% for 0.30 s, and 30% takes 0.60 s. The slow half of the second candidate costs nothing.
    samples = [[100.0, 60.0, 130.0], [100.0, 140.0, 130.0]]
    state = with_costs(samples, (0, 2, 4), known=1)
    assert suggested(state) == (2, 2, "expected improvement 20.00% for 0.30 s")
    assert suggested(with_costs(samples, (0, 3, 4), known=1)) == (4, 4, "expected improvement 30.00% for 0.60 s")
    # Where the whole model does not run, nothing is gained.
    state._contenders = replace(state.contenders, tokens_NA=np.array([[100.0, 60.0, 130.0], [100.0, 0.0, 130.0]]))
    assert suggested(state) == (4, 4, "expected improvement 30.00% for 0.60 s")


@pytest.mark.parametrize(("share", "suggested"), [(0.99, False), (1.01, True)])
def test_an_improvement_far_below_the_tolerance_is_not_worth_a_trial(share: float, suggested: bool) -> None:
    better = 100.0 * (1 + share * NEGLIGIBLE * 0.01)
    state = with_an_unknown_rival(composed=better, whole=better)
    assert (suggest_measurement(state) is not None) is suggested


@pytest.mark.parametrize(("composed", "whole"), [(100.0, 103.0), (103.0, 0.0)])
def test_what_only_whole_models_show_is_no_reason_to_measure_components(composed: float, whole: float) -> None:
    assert suggest_measurement(with_an_unknown_rival(composed, whole)) is None


@pytest.mark.parametrize(("better", "suggested"), [(0.029, False), (0.03, True), (0.3, True)])
def test_a_rival_that_is_hardly_ever_better_is_not_run_again(better: float, suggested: bool) -> None:
    found = suggest_measurement(rival_pair((100.0, 99.0), better))
    assert (found is not None) is suggested
    if found is not None:
        assert found.again
        assert found.reason == f"another run: a rival is better with probability {better:.2f}"


def test_a_stage_that_does_not_decide_repeats_nothing() -> None:
    state = rival_pair((100.0, 99.0), 0.3)
    assert suggest_measurement(state, decides=True) is not None
    assert suggest_measurement(state, decides=False) is None


def test_another_run_measures_what_most_blurs_the_difference() -> None:
    state = rival_pair((100.0, 99.0), 0.3)
    noisy = next(c for c in state.table.decompositions[state.contenders.rows[1]].components if c.kind.value == "head")
    state.surrogate.log_std_K[:] = 1e-5
    state.surrogate.log_std_K[state.table.column[noisy]] = 0.1
    found = suggest_measurement(state)
    assert found is not None
    assert found.components == (noisy,)
    assert found.row == state.contenders.rows[1]


def test_what_both_candidates_have_in_common_is_never_run_again() -> None:
    state = rival_pair((100.0, 99.0), 0.3)
    components = [set(state.table.decompositions[row].components) for row in state.contenders.rows]
    found = suggest_measurement(state)
    assert found is not None
    assert not set(found.components) & components[0] & components[1]
