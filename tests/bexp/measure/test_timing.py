import gc
import math

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


class Clock:
    """Stands for the host's clock, so that other processes of the host cost no time."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("bexp.measure.timing.time", clock)
    return clock


class SlowPasses:
    """Counts, and takes known times."""

    is_chainable = False

    def __init__(self, clock: Clock, *, training: bool) -> None:
        self.clock = clock
        self.training = training
        self.calls: list[str] = []

    def prepare_forward(self) -> None:
        self.calls.append("prepare_forward")
        self._take(0.004)

    def forward(self) -> None:
        self.calls.append("forward")
        self._take(0.002)

    def prepare_backward(self) -> None:
        self.calls.append("prepare_backward")
        self._take(0.004)

    def backward(self) -> None:
        self.calls.append("backward")
        self._take(0.006)

    def run_chain(self, length: int) -> None:
        raise AssertionError("these passes cannot be in a row")

    def _take(self, seconds: float) -> None:
        self.clock.now += seconds


def test_preparation_is_not_in_the_time(clock: Clock) -> None:
    timing = HostTimer().time(SlowPasses(clock, training=True))
    assert timing.device_seconds == pytest.approx(0.008)
    assert timing.forward_device_seconds == pytest.approx(0.002)
    assert timing.host_seconds == timing.device_seconds
    assert timing.repeats >= 5


def test_eval_has_no_backward(clock: Clock) -> None:
    passes = SlowPasses(clock, training=False)
    timing = HostTimer().time(passes)
    assert set(passes.calls) == {"prepare_forward", "forward"}
    assert timing.device_seconds == timing.forward_device_seconds
