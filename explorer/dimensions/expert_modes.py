"""Modes in which devices that share the experts of a layer exchange tokens with each other."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from bexp.explorer.model.base import Frozen

Size = Annotated[int, Field(ge=1, le=4096)]
Sizes = Literal["explore"] | Size | Annotated[tuple[Size, ...], Field(min_length=1, max_length=32)]
"""How many devices share something."""

Degree = Annotated[int, Field(ge=2, le=32)]
OVERLAP_DEGREES = (2, 4, 8)
"""Chunks of a micro-batch that `explore` tries."""
SHADOWED_EXPERTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of shadowed experts that `explore` tries."""


class ExpertMode(StrEnum):
    """The exchange between devices with experts: see `bexp.kernels.expert_parallel.experts`."""

    PLAIN = "plain"
    """Tokens are sent to their experts and back."""
    OVERLAPPED = "overlapped"
    """The same in chunks, while the experts compute (Tutel: Hwang et al., MLSys 2023)."""
    SHADOWED = "shadowed"
    """The most popular experts are copied to every device, which keeps its own tokens for them (FasterMoE:

    He et al., PPoPP 2022).
    """


class ExpertModes(Frozen):
    """The modes that a request explores, and the numbers that go with them."""

    expert_mode: (
        Literal["explore"]
        | ExpertMode
        | Annotated[tuple[ExpertMode, ...], Field(min_length=1, max_length=len(ExpertMode))]
    ) = Field(ExpertMode.PLAIN, description="Where experts are on several devices.")
    overlap_degree: Literal["explore"] | Degree | Annotated[tuple[Degree, ...], Field(min_length=1, max_length=32)] = (
        Field("explore", description="Chunks of a micro-batch in expert_mode 'overlapped'.")
    )
    shadowed_experts: Sizes = Field("explore", description="Experts that expert_mode 'shadowed' copies.")

    @property
    def named_expert_modes(self) -> tuple[ExpertMode, ...]:
        """The modes that the request names; none for `explore`."""
        asked = self.expert_mode
        return () if asked == "explore" else (asked,) if isinstance(asked, ExpertMode) else tuple(dict.fromkeys(asked))

    @property
    def expert_modes(self) -> tuple[ExpertMode, ...]:
        """The modes that are explored."""
        return self.named_expert_modes or tuple(ExpertMode)

    @property
    def named_overlap_degrees(self) -> tuple[int, ...] | None:
        """The degrees that the request names; None for `explore`."""
        return named_sizes(self.overlap_degree)

    @property
    def named_shadowed_experts(self) -> tuple[int, ...] | None:
        """The numbers of experts that the request names; None for `explore`."""
        return named_sizes(self.shadowed_experts)


def named_sizes(asked: Sizes) -> tuple[int, ...] | None:
    """Return the sizes that a request names, ascending; None for `explore`."""
    if asked == "explore":
        return None
    return (asked,) if isinstance(asked, int) else tuple(sorted(set(asked)))
