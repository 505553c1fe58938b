"""How devices that share the experts of a layer exchange tokens with each other."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from bexp.explorer.dimensions.options import Sizes, named_sizes
from bexp.explorer.model.base import Frozen, RuleError

if TYPE_CHECKING:
    from bexp.explorer.request.request import ExplorationRequest

Degree = Annotated[int, Field(ge=2, le=32)]
OVERLAP_DEGREES = (2, 4, 8)
"""Chunks of a micro-batch that `explore` tries."""
SHADOWED_EXPERTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of shadowed experts that `explore` tries."""


class ExpertMode(StrEnum):
    """What passes between devices with experts, and when: see `bexp.kernels.expert_parallel.experts`.

    `plain` sends tokens to their experts and back. `overlapped` does so in chunks, beside the experts' computation
    (Tutel: Hwang et al., MLSys 2023). `shadowed` copies the most popular experts to every device, which then keeps its
    own tokens for them (FasterMoE: He et al., PPoPP 2022).
    """

    PLAIN = "plain"
    OVERLAPPED = "overlapped"
    SHADOWED = "shadowed"


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


def check_expert_modes(request: ExplorationRequest) -> None:
    """Check that the modes that a request names, and their numbers, can be.

    Raises:
        RuleError: experts are on one device alone, more of them are shadowed than there are, or a number is given for a
            mode that is not explored.
    """
    asked = request.parallelism
    moe = None if request.model is None else request.model.moe
    named = [mode for mode in asked.named_expert_modes if mode is not ExpertMode.PLAIN]
    if named and moe is None:
        raise RuleError(f"expert_mode '{named[0]}' needs a model with experts", "parallelism.expert_mode", "model.moe")
    if named and not asked.spreads_experts:
        raise RuleError(
            f"expert_mode '{named[0]}' needs experts on several devices, and expert is 1: use expert 2 or more, or "
            "expert_mode 'plain'",
            "parallelism.expert_mode",
            "parallelism.expert",
        )
    for name, mode, sizes in (
        ("overlap_degree", ExpertMode.OVERLAPPED, asked.named_overlap_degrees),
        ("shadowed_experts", ExpertMode.SHADOWED, asked.named_shadowed_experts),
    ):
        if sizes is not None and mode not in asked.expert_modes:
            raise RuleError(
                f"{name} belongs to expert_mode '{mode}', which is not explored",
                f"parallelism.{name}",
                "parallelism.expert_mode",
            )
    if moe is None:
        return
    too_many = [number for number in asked.named_shadowed_experts or () if number > moe.num_experts]
    if too_many:
        raise RuleError(
            f"shadowed_experts ({too_many[0]}) exceeds num_experts ({moe.num_experts}); the nearest that can be is "
            f"{moe.num_experts}",
            "parallelism.shadowed_experts",
            "model.moe.num_experts",
        )
