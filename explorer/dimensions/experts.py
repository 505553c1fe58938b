"""Which kernel computes the experts."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bexp.explorer.dimensions.attention import BackendName
from bexp.explorer.dimensions.dimension import Dimension, named
from bexp.explorer.model.base import Frozen

WAITING_EXPERTS = frozenset({"loop", "bmm", "eager"})
"""Expert back ends that wait for the device to count each expert's tokens. No graph can contain that."""


class ExpertsOf(Frozen):
    """The expert kernel of a candidate."""

    expert_backend: str | None = Field(None, description="Null for a model without experts.")


class ExpertsAsked(Frozen):
    """What a request says of expert kernels."""

    expert_backends: Annotated[tuple[BackendName, ...], Field(min_length=1, max_length=16)] | None = Field(
        None,
        description="The expert kernels to choose among. Null: all that the device can use but those that must be "
        "named, such as `batched_mm`.",
    )


EXPERTS = Dimension(
    name="experts", fields=("expert_backend",), asked="expert_backends", **named("experts", "expert_backend")
)
