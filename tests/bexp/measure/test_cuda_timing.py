"""What `CudaTimer` counts, on passes whose times are made up; its events need a device."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bexp.measure import cuda_timing
from bexp.measure.cuda_timing import HEAT_SECONDS, CudaTimer
from bexp.measure.passes import Passes
from bexp.measure.timing import LocalReducer, PassSample, Timing


class Clock:
    """Of a device that takes a given time for every run, and of nothing else."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class MadeUpTimer(CudaTimer):
    """Runs nothing."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.reducer = LocalReducer()
        self.clock, self.seconds, self.runs = clock, seconds, 0

    def _run(self, passes: Passes, *, repeats: int, sleep_seconds: float) -> list[PassSample]:
        self.runs += repeats
        self.clock.now += repeats * self.seconds
        self._poll()
        return [PassSample(self.seconds / 3, 2 * self.seconds / 3, 0.0)] * repeats


def timed(
    monkeypatch: pytest.MonkeyPatch, seconds: float, poll: Callable[[], None] = lambda: None
) -> tuple[Timing, int]:
    clock = Clock()
    monkeypatch.setattr(cuda_timing, "time", clock)
    timer = MadeUpTimer(clock, seconds)
    return timer.time(None, poll), timer.runs  # type: ignore[arg-type]  # a stand-in


@pytest.mark.parametrize(("seconds", "repeats"), [(4.0, 2), (1.0, 2), (0.5, 3), (0.2, 5)])
def test_every_run_of_a_long_block_counts(monkeypatch: pytest.MonkeyPatch, seconds: float, repeats: int) -> None:
    timing, runs = timed(monkeypatch, seconds)
    assert timing.repeats == runs == repeats
    assert timing.device_seconds == pytest.approx(seconds)


def test_a_short_block_counts_once_the_device_is_hot(monkeypatch: pytest.MonkeyPatch) -> None:
    timing, runs = timed(monkeypatch, 0.01)
    assert runs - timing.repeats == 1 + int(HEAT_SECONDS / 0.01)
    assert timing.repeats >= 5


def test_the_device_is_looked_at_while_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    polls: list[int] = []
    timed(monkeypatch, 0.2, lambda: polls.append(1))
    assert len(polls) == 5
