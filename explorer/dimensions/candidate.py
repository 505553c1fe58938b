"""One point of the search space, and the list of what it chooses."""

from __future__ import annotations

from typing import Any

from bexp.explorer.dimensions.attention import ATTENTION, AttentionAsked, AttentionOf
from bexp.explorer.dimensions.bta_tile import BTA_TILE, TileAsked, TileOf
from bexp.explorer.dimensions.context_parallel import CONTEXT_PARALLEL, SharingAsked, SharingOf
from bexp.explorer.dimensions.dimension import Choice, Dimension
from bexp.explorer.dimensions.execution import EXECUTION, ExecutionAsked, ExecutionOf
from bexp.explorer.dimensions.experts import EXPERTS, ExpertsAsked, ExpertsOf
from bexp.explorer.dimensions.kernels import KERNELS, KernelsAsked, KernelsOf
from bexp.explorer.dimensions.loss import LOSS, LossAsked, LossOf
from bexp.explorer.dimensions.micro_batch_size import MICRO_BATCH_SIZE, MicroBatchAsked, MicroBatchOf
from bexp.explorer.dimensions.recompute import RECOMPUTE, RecomputeAsked, RecomputeOf
from bexp.explorer.dimensions.settings import SETTINGS, SettingsOf
from bexp.explorer.dimensions.sharding import SHARDING, ShardingAsked, ShardingOf
from bexp.explorer.dimensions.variants import VariantOf, VariantsAsked
from bexp.explorer.model.target import OWN_ATTENTION

DIMENSIONS: tuple[Dimension, ...] = (
    *(MICRO_BATCH_SIZE, BTA_TILE, RECOMPUTE, ATTENTION, EXPERTS, CONTEXT_PARALLEL, SHARDING, LOSS, EXECUTION, KERNELS),
    SETTINGS,
)
"""The dimensions of one model variant, in the order in which a line for a person names them."""
CHOICES: tuple[Choice[Any], ...] = tuple(dimension for dimension in DIMENSIONS if isinstance(dimension, Choice))
"""Those with few values that have names: all that the search does with such a value is derived from this list."""


def _in_order_of_needs() -> tuple[Dimension, ...]:
    by_name = {dimension.name: dimension for dimension in DIMENSIONS}
    ordered: dict[str, Dimension] = {}
    for dimension in DIMENSIONS:
        ordered.update({name: by_name[name] for name in (*dimension.needs, dimension.name) if name not in ordered})
    return tuple(ordered.values())


NESTED = _in_order_of_needs()
"""The same, each after the dimensions that it needs: the order in which candidates are enumerated."""
FIELDS = tuple(name for dimension in DIMENSIONS for name in dimension.fields)


class Candidate(  # pydantic takes the fields of the last class first
    SettingsOf,
    KernelsOf,
    ExecutionOf,
    LossOf,
    ShardingOf,
    SharingOf,
    VariantOf,
    ExpertsOf,
    AttentionOf,
    RecomputeOf,
    TileOf,
    MicroBatchOf,
):
    """One value of each dimension, as a trainer can choose them for a given model and device."""

    @property
    def is_whole(self) -> bool:
        """Whether the candidate is of a model that is measured whole, whose code chooses the rest by itself."""
        return self.attention_backend == OWN_ATTENTION

    @property
    def support(self) -> tuple[Any, ...]:
        """The values that decide whether its whole model can be run at all."""
        return tuple(getattr(self, choice.fields[0]) for choice in CHOICES if choice.decides_support)

    def describe(self) -> str:
        """Return one line for a person: `micro_batch_size=8 bta_tile=2 recompute=none attention=flash experts=bmm`."""
        return " ".join(filter(None, (dimension.label(self) for dimension in DIMENSIONS)))


class DimensionsAsked(
    KernelsAsked,
    ExecutionAsked,
    LossAsked,
    ShardingAsked,
    SharingAsked,
    ExpertsAsked,
    AttentionAsked,
    RecomputeAsked,
    TileAsked,
    VariantsAsked,
    MicroBatchAsked,
):
    """The fields of a request about its dimensions."""


_described = {*FIELDS, *VariantOf.model_fields}
if _described != set(Candidate.model_fields):
    raise TypeError(
        f"of Candidate alone: {sorted(set(Candidate.model_fields) - _described)}: add the dimension to DIMENSIONS; of "
        f"DIMENSIONS alone: {sorted(_described - set(Candidate.model_fields))}: add the class of its field to Candidate"
    )
if _unasked := [
    dimension.asked for dimension in DIMENSIONS if dimension.asked not in (None, *DimensionsAsked.model_fields)
]:
    raise TypeError(f"a request has no {', '.join(map(str, _unasked))}: add the class to DimensionsAsked")
