"""Batch tiling on attention: how many sequences of a micro-batch the attention block computes at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Self

from pydantic import Field, model_validator

from bexp.explorer.dimensions.dimension import Dimension
from bexp.explorer.dimensions.micro_batch_size import MicroBatch, divisors
from bexp.explorer.model.base import Frozen, RuleError


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


def tiles_of(
    micro_batch_size: int, *, max_tile: int | None, allowed: Sequence[int] | None, training: bool
) -> tuple[int, ...]:
    """Return the tile sizes of one micro-batch: its divisors up to `max_tile`.

    A tile as large as the micro-batch is one recomputed attention block in training. Without a backward pass it is the
    same as the untiled block, so it is left out.
    """
    tiles = [t for t in divisors(micro_batch_size) if training or t < micro_batch_size]
    return tuple(t for t in tiles if (max_tile is None or t <= max_tile) and (allowed is None or t in allowed))


class TileOf(Frozen):
    """The attention tile of a candidate."""

    bta_tile: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Sequences of an attention tile; null: no tiling."
    )


class TileAsked(Frozen):
    """What a request says of attention tiles."""

    bta: BTASpec = BTASpec()


BTA_TILE = Dimension(
    name="bta_tile",
    fields=("bta_tile",),
    asked="bta",
    label=lambda candidate: None if candidate.is_whole else f"bta_tile={candidate.bta_tile or 'off'}",
    row=lambda candidate: None if candidate.is_whole else ("bta_tile", str(candidate.bta_tile or "off")),
)
