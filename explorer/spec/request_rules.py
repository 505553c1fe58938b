"""Rules between the fields of a request: one function a rule, each with the fields that it relates.

A rule may rely on the rules before it in `RULES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from explorer.spec.base import RuleError
from explorer.spec.candidate import Recompute, check_number
from explorer.spec.context_parallel import refuse_layout
from explorer.spec.execution import Execution, Kernels
from explorer.spec.expert_modes import check_expert_modes
from explorer.spec.legal_meshes import check_meshes, check_sizes, schedules_of
from explorer.spec.target import BEXP, TRANSFORMERS
from explorer.spec.training import Sharding

if TYPE_CHECKING:
    from explorer.spec.request import ExplorationRequest

MAX_COMBINATIONS = 3072
"""The most combinations of micro-batch, tile and recomputation; back ends multiply them by about ten."""

MAX_SHARED_COMBINATIONS = 2 * MAX_COMBINATIONS
"""The same limit with context parallelism and sharding counted in."""


def check_model_of_target(request: ExplorationRequest) -> None:
    """`bexp` needs a model, `transformers` a config.json; no target takes both."""
    if request.model is not None and request.hf_config is not None:
        raise RuleError("model and hf_config are given: one of them describes the model", "hf_config", "model")
    target = request.target_name
    if target == BEXP and request.model is None:
        raise RuleError(f"model is missing: target '{BEXP}' needs it", "model")
    if request.target_config is not None and target in (BEXP, TRANSFORMERS):
        raise RuleError(f"target_config is for a registered target; '{target}' does not read it", "target_config")
    if target == TRANSFORMERS and request.hf_config is None:
        raise RuleError(f"target '{TRANSFORMERS}' needs a Hugging Face config.json as the model", "target")


def check_sequence_of_config(request: ExplorationRequest) -> None:
    """A config.json says what lengths a model can take, and the request says which one is trained."""
    if (request.hf_config is None) is not (request.hf_seq_length is None):
        raise RuleError("hf_seq_length and hf_config are given together, or neither is", "hf_seq_length", "hf_config")


def check_training_of_target(request: ExplorationRequest) -> None:
    """Padding, autocast and LoRA change how a transformers model trains; the reference layers have none of them."""
    if request.padding != "none" and request.target_name != TRANSFORMERS:
        raise RuleError(f"padded batches need target '{TRANSFORMERS}'", "padding", "target")
    if Kernels.LIGER in request.kernels and request.target_name != TRANSFORMERS:
        raise RuleError(f"kernels '{Kernels.LIGER}' need target '{TRANSFORMERS}'", "kernels", "target")
    if request.target_name != BEXP:
        return
    if request.training.precision != "pure":
        raise RuleError(f"precision 'autocast' needs target '{TRANSFORMERS}'", "training.precision", "target")
    if request.training.lora is not None:
        raise RuleError(f"LoRA needs target '{TRANSFORMERS}'", "training.lora", "target")


def check_kernels(request: ExplorationRequest) -> None:
    """Some execution takes the kernels."""
    if Kernels.LIBRARY not in request.kernels and request.always_compiles:
        raise RuleError(
            f"kernels '{Kernels.LIGER}' need execution 'eager' or 'graph': the compiler makes kernels of its own from "
            "the same operations",
            "kernels",
            "execution",
        )


def check_executions(request: ExplorationRequest) -> None:
    """An execution is either given or chosen, and the target and the device have it."""
    if request.executions is not None and request.execution is not Execution.EAGER:
        message = "executions take the place of execution: give one of them"
        raise RuleError(message, "executions", "execution")
    field = "execution" if request.executions is None else "executions"
    if request.executions is not None and request.target_name not in (BEXP, TRANSFORMERS):
        message = f"a choice of executions needs target '{TRANSFORMERS}' or '{BEXP}'"
        raise RuleError(message, field, "target")
    if request.target_name == BEXP and request.compiles and not request.always_compiles:
        message = (
            f"for target '{BEXP}', execution may choose between 'eager' and 'graph', or between 'compile' and "
            f"'compile+graph'; a choice between eager and compiled layers needs target '{TRANSFORMERS}'"
        )
        raise RuleError(message, field, "target")
    if not request.replays:
        return
    refused = (
        (request.target_name not in (BEXP, TRANSFORMERS), "target", f"target '{TRANSFORMERS}' or '{BEXP}'"),
        (request.mode != "train", "mode", "mode 'train'"),
        (request.device_kind == "cpu", "device_kind", "a GPU; a CPU has 'eager' and 'compile'"),
        (
            request.num_devices > 1,
            "num_devices",
            "num_devices 1, because gradients are not exchanged within a graph; several devices have 'eager' and "
            "'compile'",
        ),
    )
    graphs = next(execution for execution in request.admitted_executions if execution.replays)
    for wrong, other, needed in refused:
        if wrong:
            raise RuleError(f"execution '{graphs}' needs {needed}", field, other)


def check_sharing(request: ExplorationRequest) -> None:
    """The devices, the batch and the sequence length admit the context-parallel sizes."""
    asked = request.context_parallel.sizes
    sizes = ((1,) if not request.sharings else ()) if asked == "explore" else asked
    for size in sizes:
        problem = find_sharing_problem(request, size)
        if problem is not None:
            raise problem


def find_sharing_problem(request: ExplorationRequest, size: int) -> RuleError | None:
    """Return why sequences cannot be spread over `size` devices; null if they can."""
    field = "context_parallel.sizes"
    if request.num_devices % size:
        return RuleError(f"{size} does not divide num_devices ({request.num_devices})", field, "num_devices")
    groups = request.num_devices // size
    named = f"num_devices ({groups})" if size == 1 else f"the number of groups of {size} devices ({groups})"
    if request.micro_batch_size == "auto" and request.batch_size % groups:
        return RuleError(
            f"micro_batch_size 'auto' needs batch_size ({request.batch_size}) to be a multiple of {named}",
            *((field,) if size > 1 else ()),
            *("micro_batch_size", "batch_size", "num_devices"),
        )
    if request.batch_size < groups:
        return RuleError(
            f"batch_size ({request.batch_size}) is smaller than {named}",
            *((field,) if size > 1 else ()),
            *("batch_size", "num_devices"),
        )
    if size > 1 and not request.context_parallel.layouts_over(size, request.seq_length):
        reasons = [refuse_layout(name, size, request.seq_length) for name in request.context_parallel.layouts]
        return RuleError("; ".join(filter(None, reasons)), field, "context_parallel.layouts")
    return None


def check_largest_tile(request: ExplorationRequest) -> None:
    """The cap on tiles divides the batch."""
    largest = request.bta.max_tile
    if largest is not None and request.batch_size % largest:
        message = f"bta.max_tile ({largest}) must divide batch_size ({request.batch_size})"
        raise RuleError(message, "bta.max_tile", "batch_size")


def check_experts(request: ExplorationRequest) -> None:
    """Expert back ends are for a model with experts, and its routing can be drawn."""
    if request.model is None:
        return
    if request.model.moe is not None:
        request.routing.check(request.model.moe)
    elif request.expert_backends is not None:
        raise RuleError("expert_backends given for a model without experts", "expert_backends")


def check_sharding(request: ExplorationRequest) -> None:
    """Sharding is either given or chosen, and it needs several devices."""
    levels, given = request.sharding_levels, request.training.sharding
    if levels is not None and given is not Sharding.NONE:
        raise RuleError(
            "sharding_levels take the place of training.sharding: give one of them",
            "sharding_levels",
            "training.sharding",
        )
    asked = given if levels is None else request.highest_sharding
    if asked is not Sharding.NONE and request.num_devices == 1:
        field = "training.sharding" if levels is None else "sharding_levels"
        raise RuleError(f"sharding '{asked}' needs num_devices > 1", field, "num_devices")


def check_attention_backends(request: ExplorationRequest) -> None:
    """The list of attention back ends is not undone by `flash_attention`."""
    if set(request.attention_backends or ()) == {"flash"} and not request.flash_attention:
        raise RuleError(
            "attention_backends allows only flash, and flash_attention is false",
            "attention_backends",
            "flash_attention",
        )


def check_micro_batch_sizes(request: ExplorationRequest) -> None:
    """At least one micro-batch size is left, and none that is named alone exceeds what a device gets of the batch."""
    named = [m for size in request.context_parallel_sizes for m in request.named_micro_batch_sizes(size)]
    if named and not request.micro_batch_sizes:
        size = max(request.context_parallel_sizes)
        who = "each device" if size == 1 else f"each group of {size} devices"
        most = request.largest_useful_micro_batch(size)
        raise RuleError(
            f"micro_batch_size ({min(named)}) exceeds what {who} gets of the batch: {most} sequences of batch_size "
            f"({request.batch_size}) over num_devices ({request.num_devices})",
            "micro_batch_size",
            "batch_size",
            "num_devices",
        )
    if not request.micro_batch_sizes:
        raise RuleError("micro_batch_size leaves no value to explore", "micro_batch_size")


def check_tiles(request: ExplorationRequest) -> None:
    """At least one tile is left, and each listed tile divides a micro-batch size."""
    tiles = {tile for m in request.micro_batch_sizes for tile in request.tiles_for(m)}
    if not tiles:
        raise RuleError("bta leaves no tile: none of bta.tiles divides a micro-batch size of the space", "bta")
    unused = [tile for tile in request.bta.tiles or () if tile not in tiles]
    if unused:
        message = f"bta.tiles: {unused[0]} is no factor of any micro-batch size of the space"
        raise RuleError(message, "bta.tiles", "micro_batch_size")


def check_policies(request: ExplorationRequest) -> None:
    """Each recomputation policy is one that the model and the execution have."""
    for policy in request.recompute or ():
        if policy is Recompute.EXPERTS and request.model is not None and request.model.moe is None:
            raise RuleError("recompute 'experts' given for a model without experts", "recompute")
        if policy.by_operation and request.always_compiles:
            raise RuleError(
                f"recompute '{policy}' needs execution 'eager' or 'graph': within a graph, the compiler chooses which "
                "operations to run again",
                "recompute",
                "execution",
            )


def check_numbered_policies(request: ExplorationRequest) -> None:
    """A policy names as many layers as there are; groups need whole parameters, and no pipeline cuts them."""
    for policy in request.recompute or ():
        if not policy.is_numbered:
            continue
        if request.has_mesh:
            raise RuleError(
                f"recompute '{policy}' is not for meshes: a pipeline cuts the layers into stages, and each has a "
                "number of its own; the nearest are 'none', 'selective', 'partial_25' to 'partial_75', and 'full'",
                "recompute",
                "parallelism",
            )
        if request.model is not None:
            try:
                check_number(policy, request.model.num_layers)
            except ValueError as error:
                raise RuleError(str(error), "recompute", "model.num_layers") from error
        if policy.group_size is not None and request.always_compiles and request.target_name == TRANSFORMERS:
            raise RuleError(f"recompute '{policy}' needs execution 'eager' in a transformers model", "recompute")
        level = request.highest_sharding
        if policy.group_size is not None and level.level > Sharding.ZERO1.level:
            raise RuleError(
                f"recompute '{policy}' needs whole parameters and gradients on each device (sharding none or zero1): "
                f"with '{level}', layers that run again would gather them once more",
                "recompute",
                "training.sharding",
            )


def check_policies_of_mode(request: ExplorationRequest) -> None:
    """Eval mode recomputes nothing, because it has no backward pass."""
    if request.mode == "eval" and not request.recompute_policies:
        message = "recompute must allow 'none' in eval mode: nothing is recomputed without a backward pass"
        raise RuleError(message, "recompute", "mode")


def check_policies_of_tiles(request: ExplorationRequest) -> None:
    """At least one recomputation policy can be combined with the tiles."""
    if not any(_count_combinations(request)):
        named = "' and '".join(request.recompute_policies)
        raise RuleError(
            f"bta.enable with recompute '{named}' alone leaves nothing: a tile recomputes its attention already",
            "bta.enable",
            "recompute",
        )


def check_combinations(request: ExplorationRequest) -> None:
    """The space is small enough to be enumerated."""
    combinations = sum(_count_combinations(request))
    if combinations > MAX_COMBINATIONS:
        raise RuleError(
            f"the space has {combinations} combinations of micro-batch size, tile and recomputation; "
            f"at most {MAX_COMBINATIONS} are explored: restrict one of them"
        )
    ways, levels = len(request.sharings), len(request.sharding_choices)
    shared = combinations * ways * levels
    if shared > max(MAX_SHARED_COMBINATIONS, combinations):
        raise RuleError(
            f"context_parallel and sharding: with {ways} pairs of a size and a layout and {levels} levels of "
            f"sharding the space has {shared} combinations; at most {MAX_SHARED_COMBINATIONS} are explored: "
            "restrict sizes, layouts, sharding_levels, micro_batch_size, bta or recompute"
        )


def _count_combinations(request: ExplorationRequest) -> tuple[int, int]:
    """Return the combinations of micro-batch and recomputation without a tile, and those with one."""
    tilings = [tile is not None for m in request.micro_batch_sizes for tile in request.tiles_for(m)]
    tiled = sum(tilings)
    untiled = len(tilings) - tiled
    return untiled and untiled * len(request.policies_for(None)), tiled and tiled * len(request.policies_for(1))


def check_query_groups(request: ExplorationRequest) -> None:
    """Each variant's number of query groups divides the heads."""
    if request.num_query_groups is None:
        return
    if request.model is None:
        raise RuleError("num_query_groups needs a model section, whose heads it divides", "num_query_groups")
    heads = request.model.num_attention_heads
    for groups in request.num_query_groups:
        if groups is not None and heads % groups:
            message = f"num_query_groups ({groups}) must divide num_attention_heads ({heads})"
            raise RuleError(message, "num_query_groups", "model.num_attention_heads")


def check_parallelism(request: ExplorationRequest) -> None:
    """A single device has no mesh."""
    if request.parallelism.needs_mesh is None:
        return
    if request.model is None:
        raise RuleError(f"a mesh of devices needs target '{BEXP}'", "parallelism", "target")
    check_sizes(request)


def check_mesh(request: ExplorationRequest) -> None:
    """A mesh is for the training of a model that is described, and uses nothing that its shards do not have."""
    reason_field = "fabric" if request.is_plan else "parallelism"
    if request.target_name != BEXP or request.model is None:
        whose = "a plan, which is a request with a fabric," if request.is_plan else "a mesh of devices"
        raise RuleError(f"{whose} needs target '{BEXP}'", reason_field, "target")
    refused = (
        (request.mode != "train", "mode", "a mesh is for training"),
        (
            request.context_parallel.sizes != (1,),
            "context_parallel.sizes",
            "a mesh has whole sequences on a device",
        ),
        (
            request.is_mesh and request.admitted_executions != (Execution.EAGER,),
            "execution",
            "devices that share a model need execution 'eager'; a plan, which has a fabric, may have 'compile'",
        ),
        (
            request.admitted_executions not in ((Execution.EAGER,), (Execution.COMPILE,)),
            "execution",
            "a plan needs execution 'eager' or 'compile', and no choice between them",
        ),
        (request.num_query_groups is not None, "num_query_groups", "a mesh is for one model"),
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
            raise RuleError(reason, field, reason_field)
    if request.fabric is not None:
        request.fabric.check(request.num_devices)
        return
    asked = request.parallelism.schedule
    named = () if asked == "explore" else (asked,) if isinstance(asked, str) else asked
    unknown = [schedule for schedule in named if schedule not in schedules_of(request)]
    if unknown:
        raise RuleError(
            f"schedule '{unknown[0]}' needs a fabric: only plans have it, because torch's zero-bubble pipelines run "
            "the backward of a loss or of experts twice, once for inputs and once for weights",
            "parallelism.schedule",
            "fabric",
        )


MESH_RULES: tuple[Callable[[ExplorationRequest], None], ...] = (
    check_model_of_target,
    check_sequence_of_config,
    check_mesh,
    check_training_of_target,
    check_experts,
    check_sharding,
    check_attention_backends,
    check_policies,
    check_numbered_policies,
    check_expert_modes,
    check_meshes,
)
"""The rules of a request whose devices form meshes."""

RULES: tuple[Callable[[ExplorationRequest], None], ...] = (
    check_model_of_target,
    check_sequence_of_config,
    check_training_of_target,
    check_parallelism,
    check_kernels,
    check_expert_modes,
    check_executions,
    check_sharing,
    check_largest_tile,
    check_experts,
    check_sharding,
    check_attention_backends,
    check_micro_batch_sizes,
    check_tiles,
    check_policies,
    check_numbered_policies,
    check_policies_of_mode,
    check_policies_of_tiles,
    check_combinations,
    check_query_groups,
)
