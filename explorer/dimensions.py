"""The values that micro-batch and tile may take, before any device is known."""

from __future__ import annotations

from collections.abc import Sequence

LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Micro-batch sizes of an open exploration: two an octave."""


def divisors(number: int) -> tuple[int, ...]:
    """All divisors in ascending order."""
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return tuple(sorted({*small, *(number // i for i in small)}))


def ladder_between(low: int, high: int) -> tuple[int, ...]:
    """The ladder's values within [low, high], and both ends."""
    return tuple(sorted({low, high, *(m for m in LADDER if low <= m <= high)}))


def tiles_of(
    micro_batch_size: int, *, max_tile: int | None, allowed: Sequence[int] | None, training: bool
) -> tuple[int, ...]:
    """Tile sizes of one micro-batch: its divisors up to `max_tile`.

    A tile as large as the micro-batch is one recomputed attention block in training; without a backward pass it is
    the untiled block, and so not a choice of its own.
    """
    tiles = [t for t in divisors(micro_batch_size) if training or t < micro_batch_size]
    return tuple(t for t in tiles if (max_tile is None or t <= max_tile) and (allowed is None or t in allowed))
