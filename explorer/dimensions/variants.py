"""Dimensions that change the model itself: its variants are searched one after the other, and compared."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bexp.explorer.model.base import Frozen, is_null
from bexp.explorer.model.model import CapacityFactor, Variant

MAX_NUM_QUERY_GROUPS_VARIANTS = MAX_CAPACITY_FACTORS = 8


class VariantOf(Frozen):
    """The model variant that a candidate is for."""

    num_query_groups: Annotated[int, Field(ge=1)] = Field(
        description="The number in the model variant that this candidate is for."
    )
    capacity_factor: float | None = Field(
        None, description="That of the model variant that this candidate is for.", exclude_if=is_null
    )

    @property
    def variant(self) -> Variant:
        """The model variant that the candidate is for."""
        return Variant(self.num_query_groups, self.capacity_factor)


class VariantsAsked(Frozen):
    """The model variants that a request compares."""

    num_query_groups: (
        Annotated[
            tuple[Annotated[int, Field(ge=1, le=1024)] | None, ...],
            Field(min_length=1, max_length=MAX_NUM_QUERY_GROUPS_VARIANTS),
        ]
        | None
    ) = Field(None, description="Settings to compare as separate models; they change the model.")
    capacity_factors: (
        Annotated[tuple[CapacityFactor | None, ...], Field(min_length=1, max_length=MAX_CAPACITY_FACTORS)] | None
    ) = Field(
        None,
        description="Values of model.moe.capacity_factor to compare as separate models; a list there means the same.",
        exclude_if=is_null,
    )
