"""Timers of several ranks, as threads: however different their clocks, they run the passes equally often."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bexp.measure.timing import HostTimer, Timing, TimingBudget
from tests.waits import PATIENCE_SECONDS

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
