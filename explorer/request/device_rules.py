"""Rules about the devices of a request: what is spread over them, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bexp.explorer.dimensions.expert_modes import ExpertMode
from bexp.explorer.model.base import RuleError

if TYPE_CHECKING:
    from bexp.explorer.request.request import ExplorationRequest


def check_expert_modes(request: ExplorationRequest) -> None:
    """Check the modes that a request names, and their numbers.

    Raises:
        RuleError: experts are on one device alone, more of them are shadowed than there are, or a number is given for
            another mode.
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
