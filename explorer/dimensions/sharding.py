"""Which training state is sharded over the devices."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from bexp.explorer.dimensions.dimension import Dimension, named
from bexp.explorer.model.base import Frozen
from bexp.explorer.model.training import Sharding


class ShardingOf(Frozen):
    """The level of sharding of a candidate."""

    sharding: Sharding | None = Field(
        None, description="Null: the request's training.sharding, because it has no sharding_levels."
    )


class ShardingAsked(Frozen):
    """What a request says of levels of sharding, beyond training.sharding."""

    sharding_levels: (
        Literal["explore"] | Annotated[tuple[Sharding, ...], Field(min_length=1, max_length=len(Sharding))] | None
    ) = Field(
        None,
        description="Levels to choose among in place of training.sharding, `explore` for all; a list or `explore` "
        "there means the same.",
    )


SHARDING = Dimension(name="sharding", fields=("sharding",), asked="sharding_levels", **named("sharding", "sharding"))
