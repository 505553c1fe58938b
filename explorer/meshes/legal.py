"""The meshes that a request admits: sizes that divide what they cut, and schedules with enough micro-batches.

The rules of a request whose devices form meshes stand at the end.
"""

from __future__ import annotations

from collections.abc import Iterator

from bexp.explorer.dimensions.attention import ATTENTION
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.dimensions.expert_modes import Sizes, named_sizes
from bexp.explorer.dimensions.experts import EXPERTS
from bexp.explorer.dimensions.kernels import KERNELS
from bexp.explorer.dimensions.micro_batch_size import divisors, nearest_sizes
from bexp.explorer.dimensions.parallelism import MODEL_PARALLEL_SIZES, Schedule
from bexp.explorer.dimensions.recompute import RECOMPUTE
from bexp.explorer.dimensions.sharding import SHARDING
from bexp.explorer.meshes.mesh import Mesh
from bexp.explorer.model.base import RuleError
from bexp.explorer.model.model import ModelSpec
from bexp.explorer.model.target import BEXP
from bexp.explorer.model.training import Sharding
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

MOST_VIRTUAL_STAGES = 8
"""The most stages of one rank that `explore` tries."""


def legal_meshes(request: ExplorationRequest) -> tuple[Mesh, ...]:
    """Return the meshes that a request admits, without regard to memory, those of fewer devices a replica first.

    Raises RuleError as `check_meshes` does.
    """
    meshes = dict.fromkeys(_meshes(request))
    return tuple(sorted(meshes, key=lambda mesh: mesh.tensor * mesh.pipeline * mesh.expert))


def check_sizes(request: ExplorationRequest) -> None:
    """Check each named size by itself.

    Raises RuleError if the model or the devices do not admit one; it names the nearest sizes that they do.
    """
    for name in MODEL_PARALLEL_SIZES:
        _candidates(name, getattr(request.parallelism, name), request)


def check_meshes(request: ExplorationRequest) -> None:
    """Check that a request admits a mesh; the time does not grow with the number of meshes.

    Raises RuleError if a named size can be part of no mesh, or nothing is left; it names the nearest sizes that
    can.
    """
    next(_meshes(request))


def _meshes(request: ExplorationRequest) -> Iterator[Mesh]:
    """Yield the meshes, some of them several times; there is at least one, or a RuleError."""
    asked = request.parallelism
    dimensions = {name: _candidates(name, getattr(asked, name), request) for name in MODEL_PARALLEL_SIZES}
    problem: RuleError | None = None
    is_empty = True
    for tensor in dimensions["tensor"]:
        for pipeline in dimensions["pipeline"]:
            refusal = _find_problem(request, tensor, pipeline)
            if refusal is not None:
                problem = problem or refusal
                continue
            for mesh in _meshes_of(request, tensor, pipeline, dimensions):
                is_empty = False
                yield mesh
    if is_empty:
        raise problem or RuleError(
            "no mesh is left: virtual_stages need schedule 'interleaved' and a pipeline, and 'interleaved' needs "
            "virtual_stages above 1 and micro-batches that are a multiple of the pipeline's ranks; an expert size "
            "divides the devices of a stage, and needs either sharding none or as many devices in a stage; a pipeline "
            "needs sharding none or zero1",
            "parallelism",
        )


def _meshes_of(
    request: ExplorationRequest, tensor: int, pipeline: int, dimensions: dict[str, tuple[int, ...]]
) -> Iterator[Mesh]:
    data = request.num_devices // (tensor * pipeline)
    for schedule, virtual in _schedules(request, pipeline, data, dimensions["virtual_stages"]):
        for expert in dimensions["expert"]:
            if (tensor * data) % expert:
                continue
            for sharding in request.space.sharding_choices:
                level = sharding or request.training.sharding
                if not _is_run_whole(tensor, pipeline, data, expert, level):
                    continue
                yield Mesh(
                    tensor=tensor,
                    pipeline=pipeline,
                    virtual_stages=virtual,
                    schedule=schedule,
                    expert=expert,
                    data=data,
                    sharding=level if data > 1 else Sharding.NONE,
                )


def _is_run_whole(tensor: int, pipeline: int, data: int, expert: int, sharding: Sharding) -> bool:
    """Return whether ranks run such a mesh.

    Spread experts are not sharded as well. So sharding goes with them only where each expert is on one device of a
    stage. torch's pipelines reduce gradients once, after the last micro-batch. With ZeRO-2 and 3 a rank would therefore
    hold and exchange the same as with ZeRO-1.
    """
    if pipeline > 1 and data > 1 and sharding.level > Sharding.ZERO1.level:
        return False
    return expert == 1 or sharding is Sharding.NONE or tensor * data == expert


def _schedules(
    request: ExplorationRequest, pipeline: int, data: int, virtual_sizes: tuple[int, ...]
) -> Iterator[tuple[Schedule | None, int]]:
    if pipeline == 1:
        if 1 in virtual_sizes:
            yield None, 1
        return
    for schedule in request.parallelism.named_schedules or Schedule:
        if schedule is not Schedule.INTERLEAVED:
            if 1 in virtual_sizes:
                yield schedule, 1
            continue
        divides = any(n % pipeline == 0 for n in _micro_batch_counts(request, data))
        for virtual in virtual_sizes:
            if virtual > 1 and pipeline * virtual <= request.shapes.num_layers and divides:
                yield schedule, virtual


def _candidates(name: str, asked: Sizes, request: ExplorationRequest) -> tuple[int, ...]:
    """Return the sizes of one dimension that the model and the devices admit by themselves.

    Raises RuleError if the request names one that they do not admit.
    """
    most = min(_largest(name, request.shapes), MOST_VIRTUAL_STAGES if name == "virtual_stages" else 4096)
    whole = range(1, most + 1) if name == "virtual_stages" else divisors(request.num_devices)
    legal = [size for size in whole if _refuse_size(name, size, request) is None]
    named = named_sizes(asked)
    if named is None:
        return tuple(size for size in legal if size <= most)
    for size in named:
        reason = _refuse_size(name, size, request)
        if reason is not None:
            nearest = " or ".join(map(str, nearest_sizes(size, legal)))
            raise RuleError(f"{name} ({size}) {reason}; the nearest that can be is {nearest}", f"parallelism.{name}")
    return named


def _largest(name: str, model: ModelSpec) -> int:
    if name == "tensor":
        return model.query_groups
    if name == "expert":
        return 1 if model.moe is None else model.moe.num_experts
    return model.num_layers


def _refuse_size(name: str, size: int, request: ExplorationRequest) -> str | None:
    """Return why a mesh cannot have this size in this dimension, whatever the others; None if it can."""
    model = request.shapes
    if name == "virtual_stages":
        return None if size <= model.num_layers else f"exceeds num_layers ({model.num_layers})"
    if name == "expert" and size > 1 and model.moe is None:
        return "needs a model with experts"
    experts = 1 if model.moe is None else model.moe.num_experts
    if name == "expert" and size > experts:
        return f"exceeds num_experts ({experts})"
    if request.num_devices % size:
        return f"does not divide num_devices ({request.num_devices})"
    if name == "pipeline":
        return None if size <= model.num_layers else f"exceeds num_layers ({model.num_layers})"
    if name == "expert":
        return None if experts % size == 0 else f"does not divide num_experts ({experts})"
    divided = {
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.query_groups,
        "ffn_hidden_size": model.ffn_hidden_size,
        "seq_length": model.seq_length,
        "expert_ffn_hidden_size": 0 if model.moe is None else model.moe.expert_ffn_hidden_size,
        "shared_expert_ffn_hidden_size": 0 if model.moe is None else model.moe.shared_expert_ffn_hidden_size,
    }
    undivided = next((field for field, number in divided.items() if number % size), None)
    return None if undivided is None else f"does not divide {undivided} ({divided[undivided]})"


def _find_problem(request: ExplorationRequest, tensor: int, pipeline: int) -> RuleError | None:
    """Return why no mesh has both sizes; None if one has."""
    devices, batch = request.num_devices, request.effective_batch_size
    fields = ("parallelism.tensor", "parallelism.pipeline", "num_devices")
    if devices % (tensor * pipeline):
        nearest = nearest_sizes(pipeline, [size for size in divisors(devices // tensor) if size != pipeline])
        return RuleError(
            f"tensor ({tensor}) x pipeline ({pipeline}) does not divide num_devices ({devices}); with tensor {tensor} "
            f"the nearest pipeline is {' or '.join(map(str, nearest))}",
            *fields,
        )
    data = devices // (tensor * pipeline)
    counts = _micro_batch_counts(request, data)
    if not counts:
        sizes = ", ".join(map(str, request.space.all_micro_batch_sizes[:4]))
        return RuleError(
            f"batch_size ({batch}) does not divide into micro-batches of {sizes} on {data} data-parallel replicas, "
            f"which tensor {tensor} and pipeline {pipeline} leave of num_devices ({devices}): use a multiple of "
            f"{data * request.space.all_micro_batch_sizes[0]}",
            "batch_size",
            *fields,
        )
    if max(counts) < pipeline:
        return RuleError(
            f"pipeline ({pipeline}) needs at least as many micro-batches as stages, and batch_size ({batch}) gives a "
            f"replica {max(counts)}: use a batch_size of {batch // max(counts) * pipeline}, or pipeline {max(counts)}",
            "parallelism.pipeline",
            "batch_size",
        )
    return None


def _micro_batch_counts(request: ExplorationRequest, data: int) -> list[int]:
    """Return how many micro-batches a replica may have in a step."""
    share, rest = divmod(request.effective_batch_size, data)
    return [share // m for m in request.space.all_micro_batch_sizes if rest == 0 and share % m == 0]


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
        (request.context_parallel.sizes != (1,), "context_parallel.sizes", "a mesh has whole sequences on a device"),
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
        (request.base_micro_batch_size is not None, "base_micro_batch_size", "the base is the smallest mesh that fits"),
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
