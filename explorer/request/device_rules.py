"""Rules about the devices of a request: what is spread over them, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bexp.explorer.dimensions.context_parallel import refuse_layout
from bexp.explorer.dimensions.expert_modes import ExpertMode
from bexp.explorer.model.base import RuleError
from bexp.explorer.model.training import Sharding

if TYPE_CHECKING:
    from bexp.explorer.request.request import ExplorationRequest


def check_sharing(request: ExplorationRequest) -> None:
    """The devices, the batch and the sequence length admit the context-parallel sizes."""
    asked = request.context_parallel.sizes
    sizes = ((1,) if not request.space.sharings else ()) if asked == "explore" else asked
    for size in sizes:
        problem = find_sharing_problem(request, size)
        if problem is not None:
            raise problem


def find_sharing_problem(request: ExplorationRequest, size: int) -> RuleError | None:
    """Return why sequences cannot be spread over `size` devices; None if they can."""
    field = "context_parallel.sizes"
    if request.num_devices % size:
        return RuleError(f"{size} does not divide num_devices ({request.num_devices})", field, "num_devices")
    groups = request.num_devices // size
    named = f"num_devices ({groups})" if size == 1 else f"the number of groups of {size} devices ({groups})"
    if (request.keeps_batch or request.micro_batch_choice == "auto") and request.effective_batch_size % groups:
        batch = request.effective_batch_size
        below = batch // groups * groups
        return RuleError(
            f"batch_size ({batch}) must be a multiple of {named}, so that each gets as much; the nearest are "
            f"{' and '.join(str(near) for near in (below, below + groups) if near)}",
            *((field,) if size > 1 else ()),
            *("batch_size", "num_devices"),
        )
    if size > 1 and not request.context_parallel.layouts_over(size, request.seq_length):
        reasons = [refuse_layout(name, size, request.seq_length) for name in request.context_parallel.layouts]
        return RuleError("; ".join(filter(None, reasons)), field, "context_parallel.layouts")
    return None


def check_sharding(request: ExplorationRequest) -> None:
    """Sharding is either given or chosen, and it needs several devices."""
    levels, given = request.sharding_levels, request.training.sharding
    if levels is not None and given is not Sharding.NONE:
        raise RuleError(
            "sharding_levels take the place of training.sharding: give one of them",
            "sharding_levels",
            "training.sharding",
        )
    asked = given if levels is None else request.space.highest_sharding
    if asked is not Sharding.NONE and request.num_devices == 1:
        field = "training.sharding" if levels is None else "sharding_levels"
        raise RuleError(f"sharding '{asked}' needs num_devices > 1", field, "num_devices")


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
