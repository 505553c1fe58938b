"""Rules about the devices of a request: what is spread over them, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bexp.explorer.dimensions.context_parallel import refuse_layout
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.model.base import RuleError
from bexp.explorer.model.target import BEXP
from bexp.explorer.model.training import Sharding
from bexp.explorer.request.legal_meshes import check_sizes

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


def check_parallelism(request: ExplorationRequest) -> None:
    """A single device has no mesh."""
    if not request.parallelism.needs_mesh:
        return
    if request.model is None:
        raise RuleError(f"a mesh of devices needs target '{BEXP}', the reference layers", "parallelism", "target")
    check_sizes(request)


def check_mesh(request: ExplorationRequest) -> None:
    """A mesh is for the training of a model that is described, and uses nothing that its shards do not have."""
    if request.target_name != BEXP or request.model is None:
        raise RuleError(f"a mesh of devices needs target '{BEXP}'", "parallelism", "target")
    refused = (
        (request.mode != "train", "mode", "a mesh is for training"),
        (
            request.context_parallel.sizes != (1,),
            "context_parallel.sizes",
            "a mesh has whole sequences on a device",
        ),
        (
            request.space.executions != (Execution.EAGER,),
            "execution",
            "devices that share a model need execution 'eager'",
        ),
        (request.num_query_groups is not None, "num_query_groups", "a mesh is for one model"),
        (request.capacity_factors is not None, "capacity_factors", "a mesh is for one model; give one capacity factor"),
        (bool(request.bta.enable or request.bta.tiles), "bta", "shards do not tile attention"),
        (request.sampler != "bexp", "sampler", "meshes have a search of their own"),
        (request.prefer != "speed", "prefer", "of meshes the fastest is recommended"),
        (
            request.base_micro_batch_size is not None,
            "base_micro_batch_size",
            "the base is the smallest mesh that fits",
        ),
    )
    for wrong, field, reason in refused:
        if wrong:
            raise RuleError(reason, field, "parallelism")
