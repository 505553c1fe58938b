"""The error of composed peaks: small for most models, and as large as whole models show."""

from __future__ import annotations

import numpy as np
import pytest

from explorer.surrogate.peak_error import SCALE_GRID, PeakErrors, probability_below

ROWS = np.arange(50)
ERRORS = PeakErrors(50, 2000, np.random.default_rng(0))


@pytest.mark.parametrize("logs", [(), (0.0005,), (-0.015, 0.01), (0.02, 0.021, 0.019)])
def test_samples_follow_the_stated_probability(logs: tuple[float, ...]) -> None:
    samples = ERRORS.sample(ROWS, 2000, logs)
    for error in (-0.02, -0.004, 0.0, 0.004, 0.02):
        stated = probability_below(np.array([error]), logs)[0]
        assert (samples <= error).mean() == pytest.approx(stated, abs=0.04)


def test_the_posterior_is_that_of_the_joint_normal_distribution() -> None:
    """With one scale left, the posterior is that of a normal vector whose errors are covariant by half."""
    logs = (0.0401, 0.0399, 0.04, 0.04, 0.04)
    covariance = np.eye(6) + 1.0
    expected = covariance[0, 1:] @ np.linalg.solve(covariance[1:, 1:], np.array(logs))
    assert probability_below(np.array([expected]), logs)[0] == pytest.approx(0.5)


def test_one_whole_model_tells_how_far_off_the_others_are() -> None:
    room = np.array([-0.015])
    nothing, exact, off = (probability_below(room, logs)[0] for logs in ((), (0.0003,), (-0.015,)))
    assert exact < 0.005 < nothing < 0.06
    assert off > 0.2


def test_samples_do_not_depend_on_which_candidates_are_asked_for() -> None:
    assert np.array_equal(ERRORS.sample(ROWS[3:5], 100, (0.01,)), ERRORS.sample(ROWS, 2000, (0.01,))[:100, 3:5])
    assert np.all(np.diff(SCALE_GRID) > 0)
