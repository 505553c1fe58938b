"""Which kernel computes attention."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bexp.explorer.dimensions.dimension import Dimension
from bexp.explorer.model.base import Frozen

BackendName = Annotated[str, Field(min_length=1, max_length=64)]


def is_flash(attention_backend: str) -> bool:
    """Return whether a back end is FlashAttention by its name: `flash`, `sdpa:flash`, `flash_attention_2`."""
    return attention_backend in {"flash", "sdpa:flash"} or attention_backend.startswith("flash_attention")


class AttentionOf(Frozen):
    """The attention kernel of a candidate."""

    attention_backend: str


class AttentionAsked(Frozen):
    """What a request says of attention kernels."""

    attention_backends: Annotated[tuple[BackendName, ...], Field(min_length=1, max_length=16)] | None = Field(
        None, description="The attention kernels to choose among. Null: all that the device can use."
    )
    flash_attention: bool = Field(True, description="False excludes every back end that is FlashAttention.")


ATTENTION = Dimension(
    name="attention",
    fields=("attention_backend",),
    asked="attention_backends",
    label=lambda candidate: None if candidate.is_whole else f"attention={candidate.attention_backend}",
    row=lambda candidate: None if candidate.is_whole else ("attention", candidate.attention_backend),
)
