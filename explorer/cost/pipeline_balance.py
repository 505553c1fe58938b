"""The balance of layers over the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

HALVINGS = 40
"""Steps of the search for the shortest longest stage; each halves the interval that it lies in."""


def balance_layers(
    seconds: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0
) -> tuple[int, ...]:
    """Return how many consecutive layers each stage holds, such that the longest stage is as short as it can be.

    `seconds` are those of the layers in order; `first` and `last` are those of embedding and head. Each stage has at
    least one layer. Of several ways to be as short, the one with most layers in the first stages is returned.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    if num_stages > len(seconds):
        raise ValueError(f"{len(seconds)} layers are fewer than {num_stages} stages")
    low, high = 0.0, first + sum(seconds) + last
    best = _fill(seconds, num_stages, high, first, last)
    assert best is not None, "the sum of all is long enough"
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        counts = _fill(seconds, num_stages, middle, first, last)
        if counts is None:
            low = middle
        else:
            high, best = middle, counts
    return best


def _fill(seconds: Sequence[float], num_stages: int, limit: float, first: float, last: float) -> tuple[int, ...] | None:
    """Return the layers of each stage if every stage takes as many as `limit` allows; None if some are left over."""
    counts, place = [], 0
    for stage in range(num_stages):
        taken = first if stage == 0 else 0.0
        extra = last if stage == num_stages - 1 else 0.0
        end = len(seconds) - (num_stages - 1 - stage)  # each later stage needs a layer
        begin = place
        while place < end and taken + seconds[place] + extra <= limit * (1 + 1e-12):
            taken += seconds[place]
            place += 1
        if place == begin:
            return None
        counts.append(place - begin)
    return tuple(counts) if place == len(seconds) else None
