"""Which plan a class of rows gets, from its measured seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
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


ByLoad = Mapping[str, Mapping[str, Seconds]]
"""The seconds of each plan under each load: `{"uniform": {"grouped_mm": Seconds(...)}}`."""


def choose(seconds: ByLoad, stock: str) -> str:
    """Return the plan with the least worst ratio to the fastest, over the loads; `stock` where none is clearly faster.

    A plan counts only if it was timed under every load and is nowhere slower than `stock`. If `stock` itself was not
    timed under every load, the other plans are compared with each other alone.
    """
    names = dict.fromkeys(name for times in seconds.values() for name in times)
    timed = [name for name in names if all(name in times for times in seconds.values())]
    if stock not in timed:
        return min(timed, key=lambda name: _regret(seconds, name, timed), default=stock)
    safe = [name for name in timed if name == stock or _is_safe(seconds, name, stock)]
    best = min(safe, key=lambda name: (_regret(seconds, name, safe), name != stock))
    return best if any(_is_faster(times[best], times[stock]) for times in seconds.values()) else stock


def _regret(seconds: ByLoad, name: str, names: list[str]) -> float:
    return max(times[name].median / min(times[other].median for other in names) for times in seconds.values())


def _is_safe(seconds: ByLoad, name: str, stock: str) -> bool:
    return not any(_is_faster(times[stock], times[name]) for times in seconds.values())


def _is_faster(one: Seconds, other: Seconds) -> bool:
    """Whether `one` is faster than `other` by more than both kinds of noise."""
    noise = NUM_ERRORS * math.hypot(one.error, other.error)
    return other.median - one.median > max(noise, LEVEL * other.median)
