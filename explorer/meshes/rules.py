"""The rules of a request whose devices form meshes."""

from __future__ import annotations

from bexp.explorer.dimensions.attention import ATTENTION
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.dimensions.experts import EXPERTS
from bexp.explorer.dimensions.kernels import KERNELS
from bexp.explorer.dimensions.recompute import RECOMPUTE
from bexp.explorer.dimensions.sharding import SHARDING
from bexp.explorer.meshes.legal import check_meshes, check_sizes
from bexp.explorer.model.base import RuleError
from bexp.explorer.model.target import BEXP
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.request.request_rules import (
    RULES,
    Rule,
    check_capacity,
    check_expert_modes,
    check_lengths,
    check_model_of_target,
    check_quantization,
    check_routing,
    check_sequence_of_config,
    check_training_of_target,
)
from bexp.explorer.request.trainer_rules import check_trainer


def check_single_device(request: ExplorationRequest) -> None:
    """Check that the model admits the sizes, although a single device forms no mesh."""
    if request.model is None:
        raise RuleError(f"a mesh of devices needs target '{BEXP}', the reference layers", "parallelism", "target")
    check_sizes(request)


def check_mesh(request: ExplorationRequest) -> None:
    """Check that a mesh is for the training of a described model, and uses nothing that its shards do not have."""
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


def check_whole_layers(request: ExplorationRequest) -> None:
    """Check that no policy names a number of layers, because a pipeline cuts them."""
    numbered = next((policy for policy in request.recompute or () if policy.is_numbered), None)
    if numbered is not None:
        raise RuleError(
            f"recompute '{numbered}' is not for meshes: a pipeline cuts the layers into stages, and each has a number "
            "of its own; the nearest are 'none', 'selective', 'partial_25' to 'partial_75', and 'full'",
            "recompute",
            "parallelism",
        )


def check_dimensions(request: ExplorationRequest) -> None:
    """Check that the dimensions that meshes have admit what the request says of them."""
    place = request.space.place
    for dimension in (KERNELS, SHARDING, EXPERTS, ATTENTION, RECOMPUTE):
        dimension.check(place)


SINGLE_DEVICE_RULES: tuple[Rule, ...] = (*RULES, check_single_device)
MESH_RULES: tuple[Rule, ...] = (
    check_model_of_target,
    check_sequence_of_config,
    check_quantization,
    check_mesh,
    check_lengths,
    check_training_of_target,
    check_routing,
    check_capacity,
    check_whole_layers,
    check_dimensions,
    check_expert_modes,
    check_trainer,
    check_meshes,
)
