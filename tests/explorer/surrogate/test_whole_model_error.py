"""Conditioning on whole models against the exact posterior of the same Gaussian model."""

from __future__ import annotations

import numpy as np
import pytest

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.surrogate.whole_model_error import (
    COMMON_STD,
    COMPILED_STD,
    OWN_STD,
    POLICY_STD,
    REPLAY_STD,
    REPORT_STD,
    SIZE_OCTAVES,
    SIZE_STD,
    CompositionErrors,
    ReportedError,
    WholeModelRun,
)

NUM_SAMPLES = 40_000
CANDIDATES = [
    Candidate(micro_batch_size=m, recompute=policy, attention_backend="cudnn", num_query_groups=1)
    for m, policy in ((1, Recompute.NONE), (2, Recompute.NONE), (1, Recompute.FULL), (2, Recompute.FULL))
]
ROWS = np.arange(len(CANDIDATES))


def errors() -> CompositionErrors:
    return CompositionErrors(CANDIDATES, "cuda", 0, NUM_SAMPLES, np.random.default_rng(0))


def test_samples_of_what_was_run_whole_have_the_covariance_that_is_stated() -> None:
    sampled = np.cov(errors().sample(NUM_SAMPLES, ROWS, run_whole=ROWS).T)
    assert sampled == pytest.approx(errors().covariance(ROWS, ROWS), abs=3e-5)


def test_what_was_not_run_whole_has_heavy_tails() -> None:
    model = errors()
    heavy, light = model.sample(NUM_SAMPLES, ROWS), model.sample(NUM_SAMPLES, ROWS, run_whole=ROWS)
    own = heavy[:, 0] - light[:, 0]  # what the tails add
    assert np.abs(own).max() > 5 * OWN_STD["cuda"]
    assert np.std(heavy - heavy[:, [3]], axis=0)[0] > 1.1 * np.std(light - light[:, [3]], axis=0)[0]


@pytest.mark.parametrize("distances", [{0: 0.02}, {0: 0.02, 3: 0.015}])
def test_the_posterior_is_that_of_the_exact_gaussian(distances: dict[int, float]) -> None:
    model = errors()
    block_std = np.diag([0.004, 0.004, 0.006, 0.006])
    mixing = np.array([[1, 0.5, 0, 0], [0.5, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]) @ block_std
    composed = np.random.default_rng(1).standard_normal((NUM_SAMPLES, 4)) @ mixing.T
    rows = np.array(sorted(distances))
    runs = {row: WholeModelRun(log_tokens=value, standard_error=0.002) for row, value in distances.items()}
    found = model.condition(runs, np.zeros(len(rows)), composed[:, rows], np.full(len(rows), 0.002))
    assert found.scale == 1.0

    prior = mixing @ mixing.T + model.covariance(ROWS, ROWS)
    noise = np.eye(len(rows)) * (0.002**2 + 0.002**2 + 0.003**2)
    gain = prior[:, rows] @ np.linalg.inv(prior[np.ix_(rows, rows)] + noise)
    mean = gain @ np.array([distances[row] for row in rows])
    covariance = prior - gain @ prior[rows]

    shift, error = found.samples(ROWS, composed)
    posterior = composed + model.sample(NUM_SAMPLES, ROWS, found.scale, ROWS) + shift + error
    assert found.mean(ROWS, composed) == pytest.approx(mean, abs=3e-4)
    assert posterior.mean(axis=0) == pytest.approx(mean, abs=3e-4)
    assert np.cov(posterior.T) == pytest.approx(covariance, abs=3e-6)


@pytest.mark.parametrize("distances", [{}, {0: -0.02}])
def test_reported_runs_condition_the_error_as_in_the_exact_gaussian(distances: dict[int, float]) -> None:
    model = errors()
    composed = 0.005 * np.random.default_rng(1).standard_normal((NUM_SAMPLES, 4))
    rows = np.array(sorted(distances), dtype=np.int64)
    runs = {row: WholeModelRun(log_tokens=value, standard_error=0.002) for row, value in distances.items()}
    reported = [ReportedError(1, -0.03), ReportedError(1, -0.02)]
    found = model.condition(runs, np.zeros(len(rows)), composed[:, rows], np.zeros(len(rows)), reported)
    assert found.scale == 1.0

    error = model.covariance(ROWS, ROWS)
    seen = np.concatenate([rows, [1, 1]])
    number = len(rows)
    with_seen = error[:, seen].copy()
    among = error[np.ix_(seen, seen)] + np.diag([0.002**2 + 0.003**2] * number + [REPORT_STD**2] * 2)
    with_seen[rows, range(number)] += 0.005**2
    among[range(number), range(number)] += 0.005**2
    gain = with_seen @ np.linalg.inv(among)
    mean = gain @ np.array([*(distances[row] for row in rows), -0.03, -0.02])
    covariance = error + 0.005**2 * np.eye(4) - gain @ with_seen.T

    shift, change = found.samples(ROWS, composed)
    posterior = composed + model.sample(NUM_SAMPLES, ROWS, found.scale, ROWS) + shift + change
    assert found.mean(ROWS, composed) == pytest.approx(mean, abs=3e-4)
    assert posterior.mean(axis=0) == pytest.approx(mean, abs=4e-4)
    assert np.cov(posterior.T) == pytest.approx(covariance, abs=1e-5)


def test_what_the_winner_shows_is_taken_to_be_common_to_all() -> None:
    exact = np.zeros((2, len(CANDIDATES)))
    found = errors().condition({0: WholeModelRun(-0.02, 0.001)}, np.zeros(1), exact[:, :1], np.zeros(1))
    shift = found.mean(ROWS, exact)
    assert shift == pytest.approx(np.full(4, -0.02), abs=0.002)
    assert np.ptp(shift) < 0.002


def test_a_surprise_widens_every_part() -> None:
    exact = np.zeros((2, len(CANDIDATES)))
    expected = np.sqrt(COMMON_STD["cuda"] ** 2 + POLICY_STD**2 + SIZE_STD**2 + OWN_STD["cuda"] ** 2)
    scales = [
        errors().condition({0: WholeModelRun(k * expected, 0.001)}, np.zeros(1), exact[:, :1], np.zeros(1)).scale
        for k in (0.5, 1.0, 3.0, 10.0)
    ]
    assert scales[:2] == [1.0, pytest.approx(1.0, abs=1e-3)]
    assert 1.2 < scales[2] < scales[3] < 5


def test_nothing_depends_on_the_order_of_the_runs() -> None:
    runs = {2: WholeModelRun(0.01, 0.001), 0: WholeModelRun(0.02, 0.001)}
    composed = 0.003 * np.random.default_rng(2).standard_normal((100, 2))
    first, second = (
        errors().condition(dict(order), np.zeros(2), composed, np.zeros(2))
        for order in (runs.items(), reversed(runs.items()))
    )
    assert second.weights_NJ == pytest.approx(first.weights_NJ)


def test_a_cpu_is_expected_to_compose_worse() -> None:
    found = CompositionErrors(CANDIDATES, "cpu", 0, 10, np.random.default_rng(0)).covariance(ROWS, ROWS)
    assert found[0, 0] == pytest.approx(0.10**2 + 0.005**2 + SIZE_STD**2 + 0.008**2)


@pytest.mark.parametrize("execution", [Execution.EAGER, Execution.COMPILE])
def test_graphs_share_all_errors_of_the_kernels_that_they_replay_and_one_that_all_graphs_have(
    execution: Execution,
) -> None:
    replayed = next(one for one in Execution if one.replays and one.captured is execution)
    other = next(one for one in Execution if not one.replays and one is not execution)
    candidates = [CANDIDATES[1].model_copy(update={"execution": one}) for one in (execution, replayed, other)]
    candidates.append(CANDIDATES[2].model_copy(update={"execution": replayed}))
    found = CompositionErrors(candidates, "cuda", 0, 4000, np.random.default_rng(0))
    rows = np.arange(4)
    shared, kernels = 0.03**2 + SIZE_STD**2, 0.005**2 + 0.0032**2
    compiled = COMPILED_STD**2 if execution.compiles else 0.0
    an_octave = 0.03**2 + SIZE_STD**2 * np.exp(-0.5 / SIZE_OCTAVES**2) + compiled
    alike = shared + kernels + compiled
    assert found.covariance(rows[1:2], rows)[0].tolist() == pytest.approx(
        [alike, alike + REPLAY_STD**2, shared, an_octave + REPLAY_STD**2]
    )
    drawn = found.sample(4000, rows)
    assert np.var(drawn[:, 0] - drawn[:, 1]) == pytest.approx(REPLAY_STD**2, rel=0.1)


@pytest.mark.parametrize(("surprise", "scale"), [(1.0, 1.0), (6.0, np.sqrt(2.0)), (16.0, 2.0)])
def test_the_scale_rests_on_four_whole_models_before_the_first(surprise: float, scale: float) -> None:
    exact = np.zeros((2, len(CANDIDATES)))
    variance = 0.03**2 + 0.005**2 + SIZE_STD**2 + 0.0032**2 + 0.003**2 + 0.002**2
    runs = {0: WholeModelRun(float(np.sqrt(surprise * variance)), 0.002)}
    found = errors().condition(runs, np.zeros(1), exact[:, :1], np.zeros(1))
    assert found.scale == pytest.approx(scale)


@pytest.mark.parametrize(("apart", "scale"), [(0.004, 1.0), (0.1, 13.9)])
def test_composed_figures_are_as_unsteady_as_whole_models_that_differ_far_more_than_expected(
    apart: float, scale: float
) -> None:
    """Two runs of one candidate, as far as expected and far more, around what it is composed to."""
    exact = np.zeros((2, len(CANDIDATES)))
    run = WholeModelRun.of([np.exp(apart / 2), np.exp(-apart / 2)], [0.002, 0.002])
    found = errors().condition({0: run}, np.zeros(1), exact[:, :1], np.zeros(1))
    assert found.scale == pytest.approx(scale, rel=0.01)
