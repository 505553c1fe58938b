"""The values that a request allows in one dimension: a value, a list, a range, or everything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from bexp.explorer.model.base import Frozen, RuleError

MAX_MICRO_BATCH_SIZE = 256
WEIGHING_BATCH_SIZE = 512
"""The effective batch that weighs the optimizer where nobody states one."""

Count = Annotated[int, Field(ge=1, le=1 << 20)]
MicroBatch = Annotated[int, Field(ge=1, le=MAX_MICRO_BATCH_SIZE)]
BackendName = Annotated[str, Field(min_length=1, max_length=64)]
Size = Annotated[int, Field(ge=1, le=4096)]
Sizes = Literal["explore"] | Size | Annotated[tuple[Size, ...], Field(min_length=1, max_length=32)]
"""A dimension of a mesh."""


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


class BTASpec(Frozen):
    """Batch tiling on attention: which tiles may be tried.

    `enable` true excludes untiled attention, false excludes tiling, null explores both. `max_tile` caps the tile and
    must divide a stated batch_size. `tiles` restricts tiling to the listed sizes.
    """

    enable: bool | None = None
    max_tile: MicroBatch | None = None
    tiles: Annotated[tuple[MicroBatch, ...], Field(min_length=1, max_length=64)] | None = None

    @property
    def is_named(self) -> bool:
        """Whether a request asks for tiling, beyond leaving it to the search."""
        return bool(self.enable or self.tiles)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.enable is False and (self.tiles is not None or self.max_tile is not None):
            field = "tiles" if self.tiles is not None else "max_tile"
            raise RuleError("tiles and max_tile have no meaning when enable is false", field, "enable")
        return self


class Budget(Frozen):
    """When the search ends: at the confidence target, or when a limit is reached.

    `max_seconds` limits the time of all trials together, earlier leases' trials included. A trial counts from when it
    begins until its result is taken in, with the time to choose it and to learn from it. This is no limit of elapsed
    time: beginning a job, enumerating the space and storing come on top, and a trial that has begun is not cut short.
    Several trials in flight each count in full, so n of them use the seconds up about n times as fast. Each variant has
    an equal share of both limits, and what earlier variants left over.

    The base is measured in any case. Twice the limits hold until there is a candidate to recommend, and for what the
    answer is compared with. Whole models of recommended candidates come on top, until one has run well; then whole
    models have a third of the seconds. If noise between runs keeps the confidence below its target whatever is measured
    again, the search has an eighth of the seconds.
    """

    confidence_target: Annotated[int, Field(ge=1, le=99)] = 95
    max_trials: Annotated[int, Field(ge=1, le=2000)] = 200
    max_seconds: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    trial_timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 120.0


def is_flash(attention_backend: str) -> bool:
    """Return whether a back end is FlashAttention by its name: `flash`, `sdpa:flash`, `flash_attention_2`."""
    return attention_backend in {"flash", "sdpa:flash"} or attention_backend.startswith("flash_attention")


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


def tiles_of(
    micro_batch_size: int, *, max_tile: int | None, allowed: Sequence[int] | None, training: bool
) -> tuple[int, ...]:
    """Return the tile sizes of one micro-batch: its divisors up to `max_tile`.

    A tile as large as the micro-batch is one recomputed attention block in training. Without a backward pass it is the
    same as the untiled block, so it is left out.
    """
    tiles = [t for t in divisors(micro_batch_size) if training or t < micro_batch_size]
    return tuple(t for t in tiles if (max_tile is None or t <= max_tile) and (allowed is None or t in allowed))


def named_sizes(asked: Sizes) -> tuple[int, ...] | None:
    """Return the sizes that a request names, ascending; None for `explore`."""
    if asked == "explore":
        return None
    return (asked,) if isinstance(asked, int) else tuple(sorted(set(asked)))


def nearest_sizes(size: int, legal: Iterable[int]) -> tuple[int, ...]:
    """Return the largest legal size below `size` and the smallest above."""
    below = [each for each in legal if each < size]
    above = [each for each in legal if each > size]
    return (*([max(below)] if below else []), *([min(above)] if above else []))
