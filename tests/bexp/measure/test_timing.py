from __future__ import annotations

import gc
import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from bexp.measure import timestamps
from bexp.measure import timing as timing_module
from bexp.measure.timing import HostTimer, PassSample, Timing, TimingBudget, standard_error, summarize
from tests.waits import PATIENCE_SECONDS, Clock


@pytest.mark.parametrize(("number", "within"), [(2, 0.05), (3, 0.1), (4, 0.1), (5, 0.2), (9, 0.15), (25, 0.1)])
def test_standard_error_agrees_with_the_spread_of_medians(number: int, within: float) -> None:
    drawn = np.random.default_rng(0).normal(10.0, 0.5, size=(4000, number))
    estimated = np.mean([standard_error(list(row)) for row in drawn])
    assert estimated == pytest.approx(np.median(drawn, axis=1).std(), rel=within)


def test_one_disturbed_repeat_does_not_move_the_result() -> None:
    calm = [PassSample(1.0, 2.0, 3.0)] * 5 + [PassSample(1.01, 2.02, 3.03)] * 4
    disturbed = [*calm[:-1], PassSample(50.0, 70.0, 120.0)]
    assert summarize(disturbed).device_seconds == summarize(calm).device_seconds == 3.0
    assert math.isclose(summarize(disturbed).standard_error_seconds, 0.0, abs_tol=0.02)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(timing_module, "time", found)
    monkeypatch.setattr(timestamps, "time", found)
    return found


class SlowPasses:
    """Takes known times: 0.002 s forward, 0.006 s backward, and twice that for their preparations."""

    is_chainable = False

    def __init__(self, clock: Clock, *, training: bool, scale: float = 1.0, noise: tuple[float, ...] = (1.0,)) -> None:
        self.training = training
        self.calls: list[str] = []
        self._clock, self._scale, self._noise = clock, scale, noise

    @property
    def repeats(self) -> int:
        return self.calls.count("forward")

    def prepare_forward(self) -> None:
        self._take("prepare_forward", 0.004)

    def forward(self) -> None:
        self._take("forward", 0.002 * self._noise[self.repeats % len(self._noise)])

    def prepare_backward(self) -> None:
        self._take("prepare_backward", 0.012)

    def backward(self) -> None:
        self._take("backward", 0.006)

    def run_chain(self, length: int) -> None:
        raise AssertionError("these passes cannot be in a row")

    def _take(self, name: str, seconds: float) -> None:
        self.calls.append(name)
        self._clock.now += self._scale * seconds


def test_eval_has_no_backward(clock: Clock) -> None:
    passes = SlowPasses(clock, training=False)
    timing = HostTimer().time(passes)
    assert set(passes.calls) == {"prepare_forward", "forward"}
    assert timing.device_seconds == timing.forward_device_seconds == pytest.approx(0.002)


def test_noisy_passes_are_repeated_until_the_repeats_or_the_time_are_spent(clock: Clock) -> None:
    noise = (1.0, 2.0, 3.0, 4.0)
    short = SlowPasses(clock, training=False, scale=0.5, noise=noise)
    assert HostTimer().time(short).repeats == HostTimer.BUDGET.max_repeats
    slow = SlowPasses(clock, training=False, scale=2.0, noise=noise)
    assert HostTimer().time(slow).repeats == 17, "0.018 s each, for 0.3 s"
    slower = SlowPasses(clock, training=False, scale=25.0, noise=noise)
    assert HostTimer().time(slower).repeats == 3, "0.3 s hold two, and three are made in any case"
    slowest = SlowPasses(clock, training=False, scale=100.0, noise=noise)
    assert HostTimer().time(slowest).repeats == 2, "twice the seconds are spent"


def test_the_poll_is_called_after_each_repeat(clock: Clock) -> None:
    passes = SlowPasses(clock, training=True)
    seen: list[int] = []
    HostTimer().time(passes, lambda: seen.append(passes.repeats))
    assert seen == [1, 2, 3]


def test_the_garbage_collector_rests_while_the_host_timer_works(clock: Clock) -> None:
    resting: list[bool] = []
    HostTimer().time(SlowPasses(clock, training=True), lambda: resting.append(not gc.isenabled()))
    assert resting
    assert all(resting)


def test_one_pass_warms_up(clock: Clock) -> None:
    passes = SlowPasses(clock, training=True)
    HostTimer().warm_up(passes)
    assert passes.repeats == 1


def test_the_standard_error_of_few_samples() -> None:
    assert standard_error([]) == 0.0
    assert standard_error([3.0]) == 3.0, "one sample says nothing about the spread"
    assert standard_error([1.0, 2.0]) == pytest.approx(0.6267, abs=1e-4)
    assert standard_error([1.0, 1.0, 1.0, 2.0]) == pytest.approx(0.3133, abs=1e-4)
    assert standard_error([1.0, 1.0, 1.0, 1.0, 2.0]) == 0.0, "the absolute deviation from five samples on"
    assert standard_error([1.0, 2.0, 3.0, 4.0, 9.0]) == standard_error([1.0, 2.0, 3.0, 4.0, 5.0]) > 0.8


NUM_RANKS = 3


class Together:
    """Ranks that meet to compare; one that waits for another in vain is an error."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(NUM_RANKS, timeout=PATIENCE_SECONDS)
        self._said: dict[int, tuple[float, ...]] = {}

    def of(self, rank: int) -> Any:
        together = self

        class Rank:
            def all_reduce_max(self, *values: float) -> tuple[float, ...]:
                together._said[rank] = values
                together._barrier.wait()
                found = tuple(max(column) for column in zip(*together._said.values(), strict=True))
                together._barrier.wait()
                return found

        return Rank()


class CountedPasses:
    """As long as a rank's own disturbances make them."""

    training = True
    is_chainable = False

    def __init__(self, rank: int) -> None:
        self.count = 0
        self._random = random.Random(rank)
        self._pause = threading.Event()

    def prepare_forward(self) -> None:
        self.count += 1

    def forward(self) -> None:
        self._pause.wait(self._random.uniform(0.001, 0.004))

    def prepare_backward(self) -> None: ...

    def backward(self) -> None: ...

    def run_chain(self, length: int) -> None:
        raise AssertionError


def test_ranks_on_hosts_repeat_equally_often() -> None:
    together = Together()

    def run(rank: int) -> tuple[int, Timing]:
        passes, timer = CountedPasses(rank), HostTimer()
        timer.BUDGET = TimingBudget(min_repeats=5, max_repeats=30, seconds=0.2, relative_error=0.2)
        timer.reducer = together.of(rank)
        timer.warm_up(passes)
        return passes.count, timer.time(passes)

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        counts, timings = zip(*pool.map(run, range(NUM_RANKS)), strict=True)
    assert len(set(counts)) == 1
    assert len({timing.device_seconds for timing in timings}) == NUM_RANKS, "each reports its own"
