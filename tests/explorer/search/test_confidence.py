"""The confidence, and which candidates and components it still depends on."""

from __future__ import annotations

import numpy as np
import pytest

from bexp.explorer.search.confidence import Contenders, confidence_score, wanted_components
from tests.explorer.search.small import small_state

SAMPLES = np.array([[100.0, 99.0, 90.0], [100.0, 102.0, 90.0], [100.0, 101.0, 90.0], [100.0, 99.0, 120.0]])


def posterior(
    tokens_NA: np.ndarray = SAMPLES,
    clear: tuple[bool, ...] = (True, True, True),
    runs: tuple[float, ...] | None = None,
    undecided: tuple[bool, ...] | None = None,
    *,
    is_whole: bool = False,
    wanted: tuple[bool, ...] = (False, False, False),
) -> Contenders:
    number = tokens_NA.shape[1]
    return Contenders(
        rows=np.arange(10, 10 + number),
        mean_A=tokens_NA.mean(axis=0),
        composed_NA=tokens_NA,
        tokens_NA=tokens_NA,
        wanted_AP=np.array([wanted[:number], wanted[:number]]).T,
        clear_A=np.array(clear),
        undecided_A=np.zeros(number, dtype=np.bool_) if undecided is None else np.array(undecided),
        runs_A=np.ones(number) if runs is None else np.array(runs),
        is_whole=is_whole,
    )


def test_confidence_is_the_share_of_samples_within_the_tolerance_of_the_best() -> None:
    found = posterior()
    assert found.confidence(0, 0.01) == 0.5
    assert found.confidence(0, 0.0) == 0.25
    assert found.confidence(0, 0.02) == 0.75
    assert found.confidence(2, 0.01) == 0.25
    assert found.confidence(1, 0.2) == 1.0


@pytest.mark.parametrize(
    ("third", "wanted", "share"),
    [
        (120.0, (False, False, False), 0.75),
        (120.0, (False, True, True), 1 / 3),
        (120.0, (False, True, False), 2 / 3),
        (102.0, (False, True, True), 1 / 2),  # no sample has the third one faster by more than 3%
    ],
)
def test_of_what_is_measured_whole_no_confidence_is_above_the_share_that_was_measured(
    third: float, wanted: tuple[bool, ...], share: float
) -> None:
    samples = np.array([[100.0, 99.0, 90.0], [100.0, 102.0, 90.0], [100.0, 101.0, 90.0], [100.0, 105.0, third]])
    assert posterior(samples, wanted=wanted).confidence(0, 0.03) == 0.75, "of what is composed of parts"
    found = posterior(samples, is_whole=True, wanted=wanted)
    assert found.confidence(0, 0.03) == found.confidence_if_it_runs(0, 0.03) == share
    assert found.confidence(0, 0.03, among_A=np.array([True, False, False])) == 1.0


def test_a_whole_model_that_does_not_run_is_never_within_the_tolerance() -> None:
    found = posterior(np.array([[0.0], [0.0], [9.0], [9.0]]), (True,))
    assert found.confidence(0, 0.01) == 0.5


def test_the_search_leaves_out_what_only_whole_models_tell() -> None:
    samples = np.array([[0.0, 90.0, 0.0], [100.0, 90.0, 120.0], [100.0, 110.0, 0.0], [100.0, 90.0, 120.0]])
    found = posterior(samples, (True, True, False), undecided=(False, False, True))
    assert found.confidence(0, 0.01) == 0.0
    assert found.confidence_if_it_runs(0, 0.01) == pytest.approx(2 / 3)
    assert posterior(samples[:1], undecided=(False, False, True)).confidence_if_it_runs(0, 0.01) == 0.0


def test_an_expected_gain_counts_how_much_faster_and_how_often() -> None:
    samples = np.array([[100.0, 90.0, 0.0], [100.0, 130.0, 150.0]])
    assert posterior(samples).expected_gains(0) == pytest.approx([0.0, 0.15, 0.25])
    assert posterior(samples).expected_gains(0, most=0.4) == pytest.approx([0.0, 0.15, 0.2])


def test_the_incumbent_is_the_fastest_that_is_clear() -> None:
    assert posterior().incumbent == 1
    assert posterior(clear=(True, False, True)).incumbent == 0
    assert posterior(clear=(False, False, True)).incumbent == 2


def test_a_candidate_that_may_run_out_of_memory_is_less_likely_the_incumbent() -> None:
    assert posterior(runs=(1.0, 0.999, 1.0)).incumbent == 1
    assert posterior(runs=(1.0, 0.95, 1.0)).incumbent == 0
    assert posterior(clear=(False, False, False)).incumbent is None


@pytest.mark.parametrize(("probability", "score"), [(0.0, 0), (0.959, 95), (0.96, 96), (0.999, 99), (1.0, 99)])
def test_a_score_is_floored_and_never_a_hundred(probability: float, score: int) -> None:
    assert confidence_score(probability) == score


def test_the_optimizer_is_wanted_however_sure_its_prediction_is() -> None:
    state = small_state()
    state.surrogate.log_std_K[:] = 0.0
    wanted = state.table.columns_CP[0][wanted_components(state.table, state.surrogate, np.array([0]))[0]]
    assert [state.table.components[column].kind.value for column in wanted] == ["optimizer"]
