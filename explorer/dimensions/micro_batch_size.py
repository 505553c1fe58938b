"""How many sequences a device processes in one forward and backward pass."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from bexp.explorer.dimensions.dimension import Dimension
from bexp.explorer.model.base import Frozen, RuleError

MAX_MICRO_BATCH_SIZE = 256

MicroBatch = Annotated[int, Field(ge=1, le=MAX_MICRO_BATCH_SIZE)]


class MicroBatchRange(Frozen):
    """Bounds of an exploration; both ends belong to the space."""

    min: MicroBatch = 1
    max: MicroBatch = MAX_MICRO_BATCH_SIZE

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min > self.max:
            raise RuleError(f"min ({self.min}) exceeds max ({self.max})", "min", "max")
        return self


class ExploreRange(Frozen):
    """`{explore: {min: 2, max: 64}}`: like `explore`, within bounds and regardless of the effective batch."""

    explore: MicroBatchRange


MicroBatchChoice = (
    Literal["explore", "auto"]
    | ExploreRange
    | MicroBatch
    | Annotated[tuple[MicroBatch, ...], Field(min_length=1, max_length=64)]
)


LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Micro-batch sizes of an open exploration: two an octave."""


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors in ascending order."""
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return tuple(sorted({*small, *(number // i for i in small)}))


def ladder_between(low: int, high: int) -> tuple[int, ...]:
    """Return the ladder's values within [low, high], and both ends."""
    return tuple(sorted({low, high, *(m for m in LADDER if low <= m <= high)}))


def nearest_sizes(size: int, legal: Iterable[int]) -> tuple[int, ...]:
    """Return the largest legal size below `size` and the smallest above."""
    below = [each for each in legal if each < size]
    above = [each for each in legal if each > size]
    return (*([max(below)] if below else []), *([min(above)] if above else []))


class MicroBatchOf(Frozen):
    """The micro-batch of a candidate."""

    micro_batch_size: Annotated[int, Field(ge=1)]


class MicroBatchAsked(Frozen):
    """What a request says of the micro-batch."""

    micro_batch_size: MicroBatchChoice | None = Field(
        None,
        description="A size, a list, a range, `explore`, or `auto`: the divisors of what a device gets of the batch. "
        "Null: `auto` if batch_size is stated, else `explore`.",
    )


MICRO_BATCH_SIZE = Dimension(
    name="micro_batch_size",
    fields=("micro_batch_size",),
    label=lambda candidate: f"micro_batch_size={candidate.micro_batch_size}",
)
