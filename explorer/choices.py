"""What a request leaves open in one dimension: a value, a list, a range, or all there is."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from explorer.frozen import Frozen

MAX_MICRO_BATCH_SIZE = 256

Count = Annotated[int, Field(ge=1, le=1 << 20)]
MicroBatch = Annotated[int, Field(ge=1, le=MAX_MICRO_BATCH_SIZE)]
BackendName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")]


class MicroBatchRange(Frozen):
    """Bounds of an exploration; both ends belong to the space."""

    min: MicroBatch = 1
    max: MicroBatch = MAX_MICRO_BATCH_SIZE

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) exceeds max ({self.max})")
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
    must divide batch_size. `tiles` restricts tiling to the listed sizes.
    """

    enable: bool | None = None
    max_tile: MicroBatch | None = None
    tiles: Annotated[tuple[MicroBatch, ...], Field(min_length=1, max_length=64)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.enable is False and (self.tiles is not None or self.max_tile is not None):
            raise ValueError("tiles and max_tile have no meaning when enable is false")
        return self


class ParallelismSpec(Frozen):
    """Sizes of model parallelism. Only 1 is supported: anything else is refused rather than ignored.

    Context parallelism is a dimension of the space: see `ExplorationRequest.context_parallel`.
    """

    tensor_parallel_size: Count = 1
    pipeline_parallel_size: Count = 1
    expert_parallel_size: Count = 1
    context_parallel_size: Count = 1

    @field_validator("*")
    @classmethod
    def _only_one(cls, size: int, info: ValidationInfo) -> int:
        if size != 1 and info.field_name == "context_parallel_size":
            raise ValueError("sizes other than 1 are not supported here: give context_parallel.sizes")
        if size != 1:
            raise ValueError("sizes other than 1 are not supported yet")
        return size
