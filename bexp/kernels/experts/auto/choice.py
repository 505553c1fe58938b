"""Which plan a class of rows gets, from its measured seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

LEVEL = 0.01
"""Plans whose seconds differ by no more than this share are level, whatever the measurement's own noise."""
NUM_ERRORS = 2.0
"""Plans are level, too, if they differ by no more than this many standard errors."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """A median and its standard error."""

    median: float
    error: float = 0.0


@dataclass(frozen=True, slots=True)
class Times:
    """The seconds of a plan by the clock, in a loop that launches it, and on the device alone."""

    clock: Seconds
    device: Seconds


ByLoad = Mapping[str, Mapping[str, Times]]
"""The times of each plan under each load: `{"uniform": {"grouped_mm": Times(...)}}`."""
_Kind = Callable[[Times], Seconds]


def choose(times: ByLoad, stock: str) -> str:
    """Return the plan with the least worst ratio to the fastest, over the loads; `stock` where none is clearly faster.

    The clock decides. Among plans that are level by the clock, the device's time decides. Where the host is the limit,
    the clock is noisy and hides the device, whose work other parts of a model wait for.

    A plan counts only if it was timed under every load and is nowhere clearly slower than `stock` by the clock. If
    `stock` itself was not timed under every load, the other plans are compared with each other alone.
    """
    names = dict.fromkeys(name for each in times.values() for name in each)
    left = [name for name in names if all(name in each for each in times.values())]
    if not left:
        return stock
    if stock in left:
        left = [name for name in left if not _is_slower(times, name, stock, _clock)]
    for kind in (_clock, _device):
        best = min(left, key=lambda name: (_regret(times, name, left, kind), name != stock))
        left = [name for name in left if not _is_slower(times, name, best, kind)]
    return stock if stock in left else min(left, key=lambda name: _regret(times, name, left, _clock))


def _clock(times: Times) -> Seconds:
    return times.clock


def _device(times: Times) -> Seconds:
    return times.device


def _regret(times: ByLoad, name: str, names: list[str], kind: _Kind) -> float:
    return max(kind(each[name]).median / min(kind(each[other]).median for other in names) for each in times.values())


def _is_slower(times: ByLoad, name: str, other: str, kind: _Kind) -> bool:
    """Whether `name` is clearly slower than `other` under any load: by more than both kinds of noise."""
    pairs = ((kind(each[name]), kind(each[other])) for each in times.values())
    return any(
        mine.median - its.median > max(NUM_ERRORS * math.hypot(mine.error, its.error), LEVEL * mine.median)
        for mine, its in pairs
    )
