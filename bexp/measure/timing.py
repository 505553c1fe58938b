"""Times the passes of a block: repeats until the median is known well enough, or the time is up."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from bexp.measure.passes import Passes


@dataclass(frozen=True, slots=True)
class TimingBudget:
    """When to stop: at a relative standard error of the median, or at a number of repeats or seconds."""

    min_repeats: int
    max_repeats: int
    seconds: float
    relative_error: float = 0.004

    def is_spent_for_all(self, samples: list[float], elapsed_seconds: float, reducer: Reducer) -> bool:
        """Whether every process may stop."""
        (wanting,) = reducer.all_reduce_max(0.0 if self.is_spent(samples, elapsed_seconds) else 1.0)
        return wanting == 0.0

    def is_spent(self, samples: list[float], elapsed_seconds: float) -> bool:
        """Whether to stop; two repeats are made in any case."""
        if len(samples) < 2:
            return False
        if len(samples) >= self.max_repeats or elapsed_seconds >= 2 * self.seconds:
            return True
        if len(samples) < self.min_repeats:
            return False
        return elapsed_seconds >= self.seconds or (
            standard_error(samples) <= self.relative_error * statistics.median(samples)
        )


@dataclass(frozen=True, slots=True)
class PassSample:
    """Seconds of one repeat: of the forward and the backward on the device, and of the host that issued them."""

    forward: float
    backward: float
    host: float

    @property
    def device(self) -> float:
        """Both passes."""
        return self.forward + self.backward


@dataclass(frozen=True, slots=True)
class Timing:
    """Medians over the repeats, as `ComponentMeasurement` defines them."""

    device_seconds: float
    host_seconds: float
    forward_device_seconds: float
    standard_error_seconds: float
    repeats: int


class Reducer(Protocol):
    """How processes that time together come to the same number of repeats: they decide on the same figures."""

    def all_reduce_max(self, *values: float) -> tuple[float, ...]:
        """The largest of each value over the processes; every one must ask, in the same order."""


class LocalReducer:
    """Of a process that times alone."""

    def all_reduce_max(self, *values: float) -> tuple[float, ...]:
        """The values."""
        return values


class BlockTimer(Protocol):
    """How a device times the passes of a block.

    All decisions are taken on figures that `reducer` has passed, so that processes which communicate within the
    passes run them equally often. What is measured is each process's own.
    """

    reducer: Reducer

    def warm_up(self, passes: Passes) -> None:
        """Run until the passes are as fast as they get."""

    def time(self, passes: Passes, poll: Callable[[], None] = lambda: None) -> Timing:
        """Repeat the passes and time them; `poll` may look at the device whenever that disturbs nothing."""


def standard_error(samples: list[float]) -> float:
    """Of the median, from the median absolute deviation, which a few disturbed repeats do not move.

    For normal samples the median's standard error is sqrt(pi / 2) sigma / sqrt(n), and sigma 1.4826 deviations
    (Rousseeuw and Croux, 1993). With fewer than five samples the sample deviation stands in for the absolute one,
    which would be zero too easily.
    """
    if len(samples) < 2:
        return samples[0] if samples else 0.0
    if len(samples) < 5:
        sigma = statistics.stdev(samples)
    else:
        median = statistics.median(samples)
        sigma = 1.4826 * statistics.median([abs(sample - median) for sample in samples])
    return math.sqrt(math.pi / 2) * sigma / math.sqrt(len(samples))


def summarize(samples: list[PassSample]) -> Timing:
    """Medians of the repeats."""
    device = [sample.device for sample in samples]
    return Timing(
        device_seconds=float(np.median(device)),
        host_seconds=float(np.median([sample.host for sample in samples])),
        forward_device_seconds=float(np.median([sample.forward for sample in samples])),
        standard_error_seconds=standard_error(device),
        repeats=len(samples),
    )


@contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection while timing; what there was is collected before."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class HostTimer:
    """Times blocks on the CPU by the wall clock; the device is the host there, so both have the same seconds.

    Caches are left as the repeats leave them: the blocks of a model follow each other through the same caches, and
    whether its weights stay there is a matter of their size, which repeats show as well.
    """

    BUDGET = TimingBudget(min_repeats=5, max_repeats=50, seconds=0.5)
    MAX_WARM_UP_SECONDS = 0.5

    def __init__(self) -> None:
        self.reducer: Reducer = LocalReducer()

    def warm_up(self, passes: Passes) -> None:
        """One run, and another if it was short: threads, caches and oneDNN's primitives are there after it."""
        started = time.perf_counter()
        _time_once(passes)
        (seconds,) = self.reducer.all_reduce_max(time.perf_counter() - started)
        if seconds < self.MAX_WARM_UP_SECONDS / 2:
            _time_once(passes)

    def time(self, passes: Passes, poll: Callable[[], None] = lambda: None) -> Timing:
        """Repeat within the budget; `poll` is called between the repeats."""
        samples: list[PassSample] = []
        with collector_paused():
            started = time.perf_counter()
            while not self._is_spent(samples, time.perf_counter() - started):
                samples.append(_time_once(passes))
                poll()
        return summarize(samples)

    def _is_spent(self, samples: list[PassSample], elapsed_seconds: float) -> bool:
        return self.BUDGET.is_spent_for_all([s.device for s in samples], elapsed_seconds, self.reducer)


def _time_once(passes: Passes) -> PassSample:
    passes.prepare_forward()
    started = time.perf_counter()
    passes.forward()
    forward = time.perf_counter() - started
    backward = 0.0
    if passes.training:
        passes.prepare_backward()
        started = time.perf_counter()
        passes.backward()
        backward = time.perf_counter() - started
    return PassSample(forward, backward, forward + backward)
