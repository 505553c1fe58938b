"""Timing of a module's passes, repeated until the median is known well enough or the time is used up."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from bexp.measure.passes import Passes
from bexp.measure.timestamps import HostMark


@dataclass(frozen=True, slots=True)
class TimingBudget:
    """The limits of a timing: a small relative standard error of the median, or spent repeats or seconds."""

    min_repeats: int
    max_repeats: int
    seconds: float
    relative_error: float = 0.004

    def is_spent_for_all(self, samples: list[PassSample], elapsed_seconds: float, reducer: Reducer) -> bool:
        """Return whether every process may stop."""
        is_spent = self.is_spent([sample.device for sample in samples], elapsed_seconds)
        (wanting,) = reducer.all_reduce_max(0.0 if is_spent else 1.0)
        return wanting == 0.0

    def is_spent(self, samples: list[float], elapsed_seconds: float) -> bool:
        """Return whether to stop, after two repeats at least."""
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
    """Seconds of one repeat: the forward and the backward on the device, and the host that issued both."""

    forward: float
    backward: float
    host: float

    @property
    def device(self) -> float:
        """Forward and backward together."""
        return self.forward + self.backward


@dataclass(frozen=True, slots=True)
class Timing:
    """Medians over the repeats, as `ComponentMeasurement` defines them."""

    device_seconds: float
    host_seconds: float
    forward_device_seconds: float
    standard_error_seconds: float
    repeats: int


@dataclass(frozen=True, slots=True)
class WaitingPasses:
    """Seconds of passes whose forward makes the host wait for the device.

    `forward` and `backward` are the device's, if the host begins each of them long before the device is ready.
    """

    forward: float
    backward: float
    forward_in_row: float
    """Of one of several forwards in a row, in which the host has no lead."""
    host_backward: float
    """In which the host issues a backward."""


class Reducer(Protocol):
    """The common figures of processes that time together, so that all make the same number of repeats."""

    def all_reduce_max(self, *values: float) -> tuple[float, ...]:
        """Return the largest of each value over the processes; all of them must call this, in the same order."""


class LocalReducer:
    """The reducer of a process that times alone."""

    def all_reduce_max(self, *values: float) -> tuple[float, ...]:
        """The values."""
        return values


class BlockTimer(Protocol):
    """A device's timer of a module's passes.

    All decisions are made on figures from `reducer`, so that processes that communicate within the passes run them
    equally often. The seconds that a process returns are its own.
    """

    reducer: Reducer

    def warm_up(self, passes: Passes) -> None:
        """Run the passes until they are as fast as they get."""

    def time(self, passes: Passes, poll: Callable[[], None] = lambda: None) -> Timing:
        """Repeat the passes and time them. `poll` is called when it cannot disturb the timing."""

    def time_waiting(self, passes: Passes) -> WaitingPasses | None:
        """Time passes in which the host waits for the device; None if the host is the device."""


def standard_error(samples: list[float]) -> float:
    """The standard error of the median, from the median absolute deviation: a few disturbed repeats do not move it.

    For normal samples the standard error of the median is sqrt(pi / 2) sigma / sqrt(n). Sigma is 1.4826 times the
    median absolute deviation (Rousseeuw and Croux, 1993). With fewer than five samples that deviation is zero too
    easily, and the sample standard deviation is used for sigma.
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
    """The medians of the repeats."""
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
    """Switch the garbage collector off within the context, after collecting once."""
    gc.collect()
    with collector_off():
        yield


@contextmanager
def collector_off() -> Iterator[None]:
    """Switch the garbage collector off. Unlike `collector_paused` it does not collect first, which takes longer."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class HostTimer:
    """A timer of modules on the CPU, see `HostMark`. The device is the host there, so both have the same seconds.

    `alone` is false if other processes have a part in the passes.

    Caches stay as the repeats leave them, because the layers of a model follow each other through the same caches.
    Whether weights stay in them depends on their size, which repeats show as well.
    """

    BUDGET = TimingBudget(min_repeats=3, max_repeats=50, seconds=0.3)
    """A block's time differs by more between two runs than further repeats within one run could show."""

    def __init__(self, *, alone: bool = True) -> None:
        self.reducer: Reducer = LocalReducer()
        self._mark = partial(HostMark, alone=alone)

    def warm_up(self, passes: Passes) -> None:
        """Run once. Afterwards threads, caches and oneDNN's primitives exist."""
        self._time_once(passes)

    def time(self, passes: Passes, poll: Callable[[], None] = lambda: None) -> Timing:
        """Repeat within the budget; `poll` is called between the repeats."""
        samples: list[PassSample] = []
        with collector_paused():
            started = time.perf_counter()
            while not self.BUDGET.is_spent_for_all(samples, time.perf_counter() - started, self.reducer):
                samples.append(self._time_once(passes))
                poll()
        return summarize(samples)

    def time_waiting(self, passes: Passes) -> None:
        """Return None: a host waits for no device."""

    def _time_once(self, passes: Passes) -> PassSample:
        passes.prepare_forward()
        forward = self._seconds(passes.forward)
        backward = 0.0
        if passes.training:
            passes.prepare_backward()
            backward = self._seconds(passes.backward)
        return PassSample(forward, backward, forward + backward)

    def _seconds(self, run: Callable[[], object]) -> float:
        started = self._mark()
        run()
        return started.seconds_until(self._mark())
