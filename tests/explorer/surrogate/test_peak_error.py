"""The error of composed peaks: small for most models, and as large as whole models show."""

from __future__ import annotations

import numpy as np
import pytest

from bexp.explorer.cost.composition import Floats
from bexp.explorer.surrogate.peak_error import TAIL_RUNS, TAIL_SHARE, PeakErrors, probability_below

ROWS = np.arange(50)
ERRORS = PeakErrors(50, 2000, np.random.default_rng(0))


BOUNDS = (np.array([0.005, 0.008]), np.array([0.02]))
"""Two candidates ran out of memory: one above 0.5 or 0.8% more than composed, the other above 2%."""


@pytest.mark.parametrize("exceeded", [(), BOUNDS])
@pytest.mark.parametrize("logs", [(), (0.0005,), (-0.015, 0.01), (0.02, 0.021, 0.019)])
def test_samples_follow_the_stated_probability(logs: tuple[float, ...], exceeded: tuple[Floats, ...]) -> None:
    samples = ERRORS.sample(ROWS, 2000, logs, exceeded)
    for error in (-0.02, -0.004, 0.0, 0.004, 0.02):
        stated = probability_below(np.array([error]), logs, exceeded)[0]
        assert (samples <= error).mean() == pytest.approx(stated, abs=0.04)


def test_the_posterior_is_that_of_the_joint_normal_distribution() -> None:
    """With one scale left, the posterior is that of a normal vector whose errors are covariant by half."""
    logs = (0.0401, 0.0399, 0.04, 0.04, 0.04)
    covariance = np.eye(6) + 1.0
    expected = covariance[0, 1:] @ np.linalg.solve(covariance[1:, 1:], np.array(logs))
    assert probability_below(np.array([expected]), logs)[0] == pytest.approx(0.5)


def test_a_candidate_that_could_hardly_fit_says_little_by_running_out_of_memory() -> None:
    room = np.array([0.0])
    nothing, little, much = (probability_below(room, (), [np.array([bound])])[0] for bound in (-1.0, -0.02, 0.004))
    assert nothing > little > 0.4 > much > 0.1


def test_one_whole_model_tells_how_far_off_the_others_are() -> None:
    room = np.array([-0.015])
    nothing, exact, off = (probability_below(room, logs)[0] for logs in ((), (0.0003,), (-0.015,)))
    assert 0.01 < exact < 0.015 < nothing < 0.07, "one in twenty is far off, whatever the others show"
    assert off > 0.2


def test_however_exact_others_were_a_near_miss_may_fit_and_a_far_one_does_not() -> None:
    exact = (0.0003, 0.0, -0.0004, 0.0002)
    near, far, below = probability_below(np.array([-0.01, -0.06, 0.01]), exact)
    share = TAIL_SHARE * TAIL_RUNS / (TAIL_RUNS + len(exact))
    assert near == pytest.approx(share * 0.309, abs=0.001), "half a standard deviation of the tail"
    assert far < 0.0005
    assert 1.0 - below == pytest.approx(near, abs=1e-3), "one that is below the limit by as much may fail"


def test_a_bound_that_no_error_exceeds_is_refused() -> None:
    with pytest.raises(AssertionError, match="no error exceeds 3: something else took the memory"):
        probability_below(np.array([0.0]), (), [np.array([3.0])])
