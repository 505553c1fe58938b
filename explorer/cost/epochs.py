"""Epochs of texts, cut into micro-batches as training draws them. Axes: N micro-batches, M texts of one."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

FEWEST_SIMULATED = 400
GROUPED_TOGETHER = 50
"""The steps that transformers' LengthGroupedSampler sorts by length together, if an epoch has four times as many."""

Places = NDArray[np.int64]
Epoch = Callable[[int], Sequence[int] | Places]
"""Returns the places of samples in the order of an epoch with this seed."""


def cut_epochs(epoch: Epoch, size: int, fewest: int = FEWEST_SIMULATED) -> Places:
    """Return enough epochs, cut into micro-batches of `size`, shape (N, M)."""
    cut: list[Places] = []
    while sum(map(len, cut)) < fewest:
        order = np.asarray(epoch(len(cut)), np.int64)
        order = order[: len(order) // size * size] if len(order) >= size else np.resize(order, size)
        cut.append(order.reshape(-1, size))
    return np.concatenate(cut)


def grouped_epoch(lengths: Places, size: int) -> Epoch:
    """Return the order of transformers' LengthGroupedSampler: shuffled, and then sorted within many steps of `size`.

    The `size` of the Trainer is that of an optimizer step on one device, accumulation included.
    """
    together = size * max(1, min(len(lengths) // (size * 4), GROUPED_TOGETHER))

    def order(seed: int) -> Places:
        shuffled = np.random.default_rng(seed).permutation(len(lengths))
        parts = [shuffled[i : i + together] for i in range(0, len(shuffled), together)]
        return np.concatenate([part[np.argsort(-lengths[part], kind="stable")] for part in parts])

    return order


def fill(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return rows of whole texts in the given order, each with as many as fit in `budget` tokens; no text is longer."""
    rows: list[list[int]] = []
    left = 0
    for length in lengths:
        if length > left:
            rows.append([])
            left = budget
        rows[-1].append(length)
        left -= length
    return rows


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return rows of at most `capacity` tokens: the longest texts first, each whole in the row that it fills best.

    This is best-fit decreasing, as TRL packs; no text is longer than a row.
    """
    rows: list[list[int]] = []
    space: list[tuple[int, int]] = []  # the tokens left in a row, and its place, in ascending order
    for length in sorted(lengths, reverse=True):
        at = bisect_left(space, (length, 0))
        if at == len(space):
            rows.append([])
            left, place = capacity, len(rows) - 1
        else:
            left, place = space.pop(at)
        rows[place].append(length)
        if left > length:
            insort(space, (left - length, place))
    return rows
