"""Batch tiling on attention: how many sequences of a micro-batch the attention block computes at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from bexp.explorer.dimensions.dimension import Change, Column, Dimension, Point, Term, column_of, present
from bexp.explorer.dimensions.micro_batch_size import MICRO_BATCH_SIZE, MicroBatch, divisors
from bexp.explorer.dimensions.place import EmptySpaceError, Place, ReportedPlace
from bexp.explorer.model.base import Frozen, RuleError
from bexp.explorer.model.lengths import PACKED


class BTASpec(Frozen):
    """Batch tiling on attention: which tiles may be tried."""

    enable: bool | None = None
    """True excludes untiled attention, false excludes tiling; None explores both."""
    max_tile: MicroBatch | None = None
    """The largest tile; it must divide a stated batch_size."""
    tiles: Annotated[tuple[MicroBatch, ...], Field(min_length=1, max_length=64)] | None = None
    """The only tiles to try."""

    @property
    def is_named(self) -> bool:
        """Whether a request asks for tiling, rather than leaving it to the search."""
        return bool(self.enable or self.tiles)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.enable is False and (self.tiles is not None or self.max_tile is not None):
            field = "tiles" if self.tiles is not None else "max_tile"
            raise RuleError("tiles and max_tile have no meaning when enable is false", field, "enable")
        return self


class TileOf(Frozen):
    """The attention tile of a candidate."""

    bta_tile: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Sequences of an attention tile; null: no tiling."
    )


class TileAsked(Frozen):
    """The field of a request about attention tiles."""

    bta: BTASpec = BTASpec()


TILES = "attention tiles"


class BTATile(Dimension):
    """The tiles of a micro-batch: none, and each size that divides it."""

    def considered_for(self, micro_batch_size: int, place: Place) -> tuple[int | None, ...]:
        """Return the tiles to consider for one micro-batch size: None, and its divisors up to `max_tile`.

        A tile as large as the micro-batch is one recomputed attention block in training. Without a backward pass it is
        the same as the untiled block, so it is left out.
        """
        bta = place.asked.bta
        largest = min(bta.max_tile or micro_batch_size, micro_batch_size if place.is_training else micro_batch_size - 1)
        tiles = () if bta.enable is False else divisors(micro_batch_size)
        untiled: tuple[int | None, ...] = () if bta.enable else (None,)
        return (*untiled, *(t for t in tiles if t <= largest and (bta.tiles is None or t in bta.tiles)))

    def named_for_trainer(self, place: Place) -> Iterable[tuple[str, Any]]:
        """Yield tiling itself if a request asks for it; sizes make no difference to a trainer."""
        if place.asked.bta.is_named:
            yield "bta", True

    def check(self, place: Place) -> None:
        """Check that the cap divides a stated batch, that a tile is left, and that each listed tile divides a size."""
        bta = place.asked.bta
        if place.batching in PACKED and bta.is_named:
            raise RuleError("attention tiles divide padded rows, not packed ones", "bta", "batching")
        if bta.max_tile is not None and place.states_batch and place.batch_size % bta.max_tile:
            message = f"bta.max_tile ({bta.max_tile}) must divide batch_size ({place.batch_size})"
            raise RuleError(message, "bta.max_tile", "batch_size")
        sizes = MICRO_BATCH_SIZE.considered(place)
        tiles = {tile for m in sizes for tile in self.considered_for(m, place)}
        if sizes and not tiles:
            raise RuleError("bta leaves no tile: none of bta.tiles divides a micro-batch size of the space", "bta")
        unused = [tile for tile in bta.tiles or () if tile not in tiles]
        if sizes and unused:
            message = f"bta.tiles: {unused[0]} is no factor of any micro-batch size of the space"
            raise RuleError(message, "bta.tiles", "micro_batch_size")

    def unspent(self, place: Place) -> Point:
        """Return no tiling."""
        return {} if place.asked.bta.is_named else {"bta_tile": None}

    def compared(self, place: Place) -> Mapping[str, Any]:
        """Return no tiling, for a request that excludes it."""
        return {"bta": BTASpec(enable=False)} if place.asked.bta.enable else {}

    def relaxations(self, place: ReportedPlace) -> Iterable[Change]:
        """Yield tiling, for a request that excludes it."""
        if place.asked.bta.enable is False:
            yield Change("batch tiling on attention", {"bta": BTASpec()})

    def freed(self, place: Place) -> Change | None:
        """Return the change to any tile, for a request that names tiles."""
        bta = place.asked.bta
        return None if bta.tiles is None else Change("other tiles", {"bta": bta.model_copy(update={"tiles": None})})

    def column(self, place: ReportedPlace) -> Column:
        """Return the tiles of each micro-batch that the model's code can run."""
        is_offered = place.model.offers_tiles(named=place.asked.bta.is_named)
        cells = {
            m: [{"bta_tile": tile} for tile in self.considered_for(m, place) if tile is None or is_offered]
            for m in MICRO_BATCH_SIZE.considered(place)
        }
        if cells and not any(cells.values()):
            raise EmptySpaceError("no attention tile divides a micro-batch of the space")
        return lambda known: cells[known["micro_batch_size"]]

    def bases(self, place: ReportedPlace) -> Column:
        """Return no tiling."""
        return column_of("bta_tile", (None,))


BTA_TILE = BTATile(
    name="bta_tile",
    fields=("bta_tile",),
    asked="bta",
    term=Term(lambda tile, lacking: TILES if tile is True else f"{TILES} of {tile} sequences", present(TILES)),
    label=lambda candidate: None if candidate.is_whole else f"bta_tile={candidate.bta_tile or 'off'}",
    row=lambda candidate: None if candidate.is_whole else ("bta_tile", str(candidate.bta_tile or "off")),
)
