import gc
import math
import time

import numpy as np
import pytest

from bexp.measure.timing import HostTimer, PassSample, TimingBudget, collector_paused, standard_error, summarize

BUDGET = TimingBudget(min_repeats=3, max_repeats=6, seconds=1.0, relative_error=0.01)


@pytest.mark.parametrize(
    ("samples", "elapsed", "spent"),
    [
        ([1.0], 100.0, False),  # a second repeat is made in any case
        ([1.0, 1.0], 0.5, False),
        ([1.0, 1.0, 1.0], 0.1, True),  # exact enough
        ([1.0, 2.0, 3.0], 0.1, False),
        ([1.0, 2.0, 3.0], 1.1, True),  # out of time
        ([1.0, 2.0], 1.1, False),  # too few for that
        ([1.0, 2.0], 2.1, True),  # but not for twice that
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 0.1, True),  # out of repeats
    ],
)
def test_when_the_budget_is_spent(samples: list[float], elapsed: float, spent: bool) -> None:
    assert BUDGET.is_spent(samples, elapsed) is spent


def test_standard_error_agrees_with_the_spread_of_medians() -> None:
    rng = np.random.default_rng(0)
    drawn = rng.normal(10.0, 0.5, size=(2000, 25))
    estimated = np.mean([standard_error(list(row)) for row in drawn])
    assert estimated == pytest.approx(np.median(drawn, axis=1).std(), rel=0.15)


def test_one_disturbed_repeat_does_not_move_the_result() -> None:
    calm = [PassSample(1.0, 2.0, 3.0)] * 5 + [PassSample(1.01, 2.02, 3.03)] * 4
    disturbed = [*calm[:-1], PassSample(50.0, 70.0, 120.0)]
    assert summarize(disturbed).device_seconds == summarize(calm).device_seconds == 3.0
    assert math.isclose(summarize(disturbed).standard_error_seconds, 0.0, abs_tol=0.02)


def test_the_collector_rests_while_timing_and_runs_again() -> None:
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), collector_paused():
        assert not gc.isenabled()
        _ = 1 / 0
    assert gc.isenabled()


class SlowPasses:
    """Counts, and takes known times."""

    is_chainable = False

    def __init__(self, *, training: bool) -> None:
        self.training = training
        self.calls: list[str] = []

    def prepare_forward(self) -> None:
        self.calls.append("prepare_forward")
        _busy(0.004)

    def forward(self) -> None:
        self.calls.append("forward")
        _busy(0.002)

    def prepare_backward(self) -> None:
        self.calls.append("prepare_backward")
        _busy(0.004)

    def backward(self) -> None:
        self.calls.append("backward")
        _busy(0.006)

    def run_chain(self, length: int) -> None:
        raise AssertionError("these passes cannot be in a row")


def _busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_preparation_is_not_in_the_time() -> None:
    timing = HostTimer().time(SlowPasses(training=True))
    assert 0.008 <= timing.device_seconds < 0.0155
    assert 0.002 <= timing.forward_device_seconds < 0.0055
    assert timing.host_seconds == timing.device_seconds
    assert timing.repeats >= 5


def test_eval_has_no_backward() -> None:
    passes = SlowPasses(training=False)
    timing = HostTimer().time(passes)
    assert set(passes.calls) == {"prepare_forward", "forward"}
    assert timing.device_seconds == timing.forward_device_seconds
