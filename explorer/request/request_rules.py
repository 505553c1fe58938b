"""Every rule between the fields of a request, in order: one function a rule, each with the fields that it relates.

A rule may rely on the rules before it. The rules of the model and its target stand here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from bexp.explorer.dimensions.attention import is_flash
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.dimensions.kernels import Kernels
from bexp.explorer.dimensions.micro_batch_size import MAX_MICRO_BATCH_SIZE, divisors, nearest_sizes
from bexp.explorer.model.base import RuleError
from bexp.explorer.model.lengths import PACKED
from bexp.explorer.model.model import DType
from bexp.explorer.model.optimizers import BITSANDBYTES
from bexp.explorer.model.quantization import PLAIN, Quantization, own_method
from bexp.explorer.model.spelling import did_you_mean, shortened
from bexp.explorer.model.target import BEXP, OWN_ATTENTION, TRANSFORMERS
from bexp.explorer.model.training import Sharding
from bexp.explorer.request.device_rules import check_expert_modes, check_sharding, check_sharing
from bexp.explorer.request.execution_rules import (
    check_executions,
    check_kernels,
    check_numbered_policies,
    check_offload,
    check_policies,
    check_policies_of_mode,
)
from bexp.explorer.request.trainer_rules import check_trainer
from bexp.explorer.trainers.back_ends import ATTENTION_OF, EXPERTS_OF, RECORDED_EXPERTS

if TYPE_CHECKING:
    from bexp.explorer.request.request import ExplorationRequest

Rule = Callable[["ExplorationRequest"], None]
"""Raises RuleError for a request that breaks it."""

MAX_COMBINATIONS = 3072
"""The most combinations of micro-batch, tile and recomputation; back ends multiply them by about ten."""

MAX_SHARED_COMBINATIONS = 2 * MAX_COMBINATIONS
"""The same limit with context parallelism and sharding counted in."""


def check_largest_tile(request: ExplorationRequest) -> None:
    """The cap on tiles divides a stated batch."""
    largest = request.bta.max_tile
    if largest is not None and request.batch_size is not None and request.batch_size % largest:
        message = f"bta.max_tile ({largest}) must divide batch_size ({request.batch_size})"
        raise RuleError(message, "bta.max_tile", "batch_size")


def check_micro_batch_sizes(request: ExplorationRequest) -> None:
    """At least one micro-batch size is left: one size with a stated batch divides what a device gets of it."""
    if request.space.micro_batch_sizes:
        return
    size = max(request.devices.context_parallel_sizes)
    who = "each device" if size == 1 else f"each group of {size} devices"
    share, asked = request.effective_batch_size // request.devices.data_parallel_size(size), request.micro_batch_choice
    legal = [size for size in divisors(share) if size <= MAX_MICRO_BATCH_SIZE]
    nearest = nearest_sizes(asked, legal) if isinstance(asked, int) else ()
    raise RuleError(
        f"micro_batch_size ({asked}) does not divide what {who} gets of the batch: {share} sequences of batch_size "
        f"({request.batch_size}) over num_devices ({request.num_devices}); the nearest that divide it: "
        f"{' and '.join(map(str, nearest))}. A list or a range is independent of the batch",
        "micro_batch_size",
        "batch_size",
        "num_devices",
    )


def check_tiles(request: ExplorationRequest) -> None:
    """At least one tile is left, and each listed tile divides a micro-batch size."""
    tiles = {tile for m in request.space.micro_batch_sizes for tile in request.space.tiles_for(m)}
    if not tiles:
        raise RuleError("bta leaves no tile: none of bta.tiles divides a micro-batch size of the space", "bta")
    unused = [tile for tile in request.bta.tiles or () if tile not in tiles]
    if unused:
        message = f"bta.tiles: {unused[0]} is no factor of any micro-batch size of the space"
        raise RuleError(message, "bta.tiles", "micro_batch_size")


def check_combinations(request: ExplorationRequest) -> None:
    """Some recomputation policy can be combined with the tiles, and the space is small enough to be enumerated."""
    combinations = _count_combinations(request)
    if combinations == 0:
        named = "' and '".join(request.space.recompute_policies)
        raise RuleError(
            f"bta.enable with recompute '{named}' alone leaves nothing: a tile recomputes its attention already",
            "bta.enable",
            "recompute",
        )
    if combinations > MAX_COMBINATIONS:
        raise RuleError(
            f"the space has {combinations} combinations of micro-batch size, tile and recomputation; "
            f"at most {MAX_COMBINATIONS} are explored: restrict one of them"
        )
    ways, levels = len(request.space.sharings), len(request.space.sharding_choices)
    shared = combinations * ways * levels
    if shared > max(MAX_SHARED_COMBINATIONS, combinations):
        raise RuleError(
            f"context_parallel and sharding: with {ways} pairs of a size and a layout and {levels} levels of "
            f"sharding the space has {shared} combinations; at most {MAX_SHARED_COMBINATIONS} are explored: "
            "restrict sizes, layouts, sharding_levels, micro_batch_size, bta or recompute"
        )


def _count_combinations(request: ExplorationRequest) -> int:
    """Return the number of combinations of micro-batch, tile and recomputation."""
    space = request.space
    tilings = [tile is not None for m in space.micro_batch_sizes for tile in space.tiles_for(m)]
    if not tilings:
        return 0
    policies, tiled = space.recompute_policies, sum(tilings)
    num_tiled = len([policy for policy in policies if not policy.untiled_only])
    return (len(tilings) - tiled) * len(policies) + tiled * num_tiled


OWN = "hf_config.quantization_config"
PLAIN_WEIGHTS = f"quantization: {PLAIN} measures plain weights"


def _need_library(request: ExplorationRequest, what: str, field: str) -> None:
    """Raise RuleError unless the target is the transformers library, which `what` needs."""
    if request.target_name != TRANSFORMERS:
        raise RuleError(f"{what} target '{TRANSFORMERS}'", field, "target")


def check_quantization(request: ExplorationRequest) -> None:
    """Quantised weights are a transformers model's, whole on a device, and trained through adapters alone."""
    name = request.quantization
    if name not in (None, PLAIN):
        _need_library(request, f"quantization '{name}' needs", "quantization")
    if request.target_name != TRANSFORMERS or name == PLAIN:
        return
    _check_checkpoint(request)
    quantized = request.quantized
    if quantized is not None and request.mode == "train":
        _check_training(request, quantized)


def _check_checkpoint(request: ExplorationRequest) -> None:
    """A checkpoint that is quantised already is loaded as it is."""
    method, name = own_method(request.hf_config), request.quantization
    if method is None:
        return
    quantized = request.quantized
    if method == BITSANDBYTES:
        if quantized is None or not quantized.is_own:
            raise RuleError(f"must state either load_in_4bit or load_in_8bit; {PLAIN_WEIGHTS}", OWN)
        if name not in (None, quantized.name):
            raise RuleError(
                f"the weights of config.json have {quantized.bits} bits already; {PLAIN_WEIGHTS}", "quantization", OWN
            )
    elif name is not None:
        raise RuleError(
            f"the weights of config.json are quantised already, by '{shortened(method)}'; {PLAIN_WEIGHTS}",
            "quantization",
            OWN,
        )
    elif request.mode == "train" and request.training.lora is not None:
        raise RuleError(
            f"adapters on weights that '{shortened(method)}' quantises are not measured; {PLAIN_WEIGHTS}",
            OWN,
            "training.lora",
        )


def _check_training(request: ExplorationRequest, quantized: Quantization) -> None:
    field = OWN if quantized.is_own else "quantization"
    if request.training.lora is None:
        raise RuleError(
            f"weights in {quantized.bits} bits cannot be trained themselves: add training.lora, whose adapters are "
            f"trained in their place; {PLAIN_WEIGHTS}",
            field,
            "training.lora",
        )
    if request.training.precision != "pure":
        raise RuleError(
            "weights beside quantised ones are in float32, as peft prepares them: leave precision out",
            "training.precision",
            field,
        )
    if request.space.highest_sharding is not Sharding.NONE:
        raise RuleError("quantised weights are measured without sharding", field, "training.sharding")


def check_lengths(request: ExplorationRequest) -> None:
    """Texts of unequal length are measured eagerly on one device, with the transformers library's classes."""
    if request.lengths is None:
        if request.batching is not None:
            raise RuleError("batching needs lengths: without them every sequence is full", "batching", "lengths")
        return
    _need_library(request, "texts of unequal length need", "lengths")
    if request.num_devices > 1:
        raise RuleError("texts of unequal length are measured on one device", "lengths", "num_devices")
    if request.space.executions != (Execution.EAGER,):
        field = "execution" if request.executions is None else "executions"
        raise RuleError(
            "texts of unequal length run with execution 'eager': other lengths would be compiled or captured anew",
            field,
            "lengths",
        )
    if request.batching in PACKED and request.bta.is_named:
        raise RuleError("attention tiles divide padded rows, not packed ones", "bta", "batching")


def check_model_of_target(request: ExplorationRequest) -> None:
    """`bexp` needs a model, `transformers` a config.json; no target takes both."""
    if request.model is not None and request.hf_config is not None:
        raise RuleError("model and hf_config are given: one of them describes the model", "hf_config", "model")
    target = request.target_name
    if target == BEXP and request.model is None:
        raise RuleError(f"model is missing: target '{BEXP}' needs it", "model")
    if request.target_config is not None and not request.is_own_code:
        raise RuleError(f"target_config is for a registered target; '{target}' does not read it", "target_config")
    if target == TRANSFORMERS and request.hf_config is None:
        raise RuleError(f"target '{TRANSFORMERS}' needs a Hugging Face config.json as the model", "target")


def check_sequence_of_config(request: ExplorationRequest) -> None:
    """A config.json says what lengths a model can take, and the request says which one is trained."""
    if (request.hf_config is None) is not (request.hf_seq_length is None):
        raise RuleError("hf_seq_length and hf_config are given together, or neither is", "hf_seq_length", "hf_config")


def check_training_of_target(request: ExplorationRequest) -> None:
    """Lengths, precision and LoRA change how a transformers model trains; the reference layers have none of them."""
    if Kernels.LIGER in (request.kernels or ()):
        _need_library(request, f"kernels '{Kernels.LIGER}' need", "kernels")
    if request.training.keeps_master_weights:
        _check_master_weights(request)
    if request.training.precision == "upcast":
        _check_upcast(request)
    if request.training.float8_recipe is not None:
        _check_float8(request)
    if request.training.optimizer.of_library is not None:
        _check_library_optimizer(request)
    if request.target_name != BEXP:
        return
    if (precision := request.training.precision) != "pure":
        raise RuleError(f"precision '{precision}' needs target '{TRANSFORMERS}'", "training.precision", "target")
    if request.training.lora is not None:
        raise RuleError(f"LoRA needs target '{TRANSFORMERS}'", "training.lora", "target")


def _check_master_weights(request: ExplorationRequest) -> None:
    """Precision `master` is for all weights of a transformers model, and says what its optimizer keeps."""
    field = "training.precision"
    if request.target_name == BEXP:
        raise RuleError(
            f"precision 'master' needs target '{TRANSFORMERS}': the reference layers have master weights through "
            "training.optimizer.master_dtype, which is float32 by default",
            field,
            "target",
        )
    if request.target_name != TRANSFORMERS:
        raise RuleError(
            f"precision 'master' needs target '{TRANSFORMERS}': a target of your own keeps what its code keeps",
            field,
            "target",
        )
    if request.training.lora is not None:
        raise RuleError(
            "precision 'master' does not go with LoRA: adapters are in float32 and need no master weights",
            field,
            "training.lora",
        )
    optimizer = request.training.optimizer
    for name, kept, formats in (
        ("master_dtype", DType.FLOAT32, (DType.FLOAT32,)),
        ("grad_dtype", DType.BFLOAT16, (None, DType.BFLOAT16)),
        ("state_dtype", DType.FLOAT32, (None, DType.FLOAT32)),
    ):
        if getattr(optimizer, name) not in formats:
            where = f"training.optimizer.{name}"
            raise RuleError(f"precision 'master' keeps it in {kept}: leave {name} out", where, field)


def _check_library_optimizer(request: ExplorationRequest) -> None:
    """An optimizer of a library steps the whole parameters of a transformers model, in their own format."""
    field, name = "training.optimizer.name", request.training.optimizer.name
    known = request.training.optimizer.of_library
    _need_library(request, f"optimizer '{name}' needs", field)
    if known is not None and known.is_on_host and (request.num_devices > 1 or request.device_kind == "cpu"):
        other = "num_devices" if request.num_devices > 1 else "device_kind"
        raise RuleError(f"optimizer '{name}' steps in the host's memory, beside one GPU", field, other)
    if request.runner.lacks("optimizer", request.training.optimizer):
        return  # the trainer cannot be told it, whatever its precision
    if request.training.precision == "master":
        raise RuleError(f"optimizer '{name}' is measured without float32 master weights", field, "training.precision")
    if request.space.highest_sharding is not Sharding.NONE:
        raise RuleError(f"optimizer '{name}' is measured without sharding", field, "training.sharding")
    optimizer = request.training.optimizer
    for part in ("grad_dtype", "state_dtype"):
        if getattr(optimizer, part) is not None:
            raise RuleError(f"optimizer '{name}' decides its formats by itself: leave {part} out", field)


def _check_float8(request: ExplorationRequest) -> None:
    """Float8 is for all weights of a transformers model on one device."""
    field, precision = "training.precision", request.training.precision
    _need_library(request, f"precision '{precision}' needs", field)
    if request.training.lora is not None:
        raise RuleError(f"precision '{precision}' is measured without LoRA", field, "training.lora")
    if request.num_devices > 1:
        raise RuleError(f"precision '{precision}' is measured on one device", field, "num_devices")
    if request.mode != "train":
        raise RuleError(f"precision '{precision}' is one of training", field, "mode")


def _check_upcast(request: ExplorationRequest) -> None:
    """Precision `upcast` is what one trainer does to all weights of a transformers model on one device."""
    field = "training.precision"
    _need_library(request, "precision 'upcast' needs", field)
    if not request.runner.upcast_attention:
        raise RuleError("precision 'upcast' is measured for trainer 'axolotl' alone", field, "trainer")
    if request.training.lora is not None or request.space.highest_sharding is not Sharding.NONE:
        where = "training.lora" if request.training.lora is not None else "training.sharding"
        raise RuleError("Axolotl casts nothing to float32 beside LoRA or sharding: use precision 'pure'", field, where)


def check_experts(request: ExplorationRequest) -> None:
    """Expert back ends are for a model with experts, and its routing can be drawn."""
    if request.model is None:
        return
    if request.model.moe is not None:
        request.routing.check(request.model.moe)
    elif request.expert_backends is not None:
        raise RuleError("expert_backends given for a model without experts", "expert_backends")


def check_capacity(request: ExplorationRequest) -> None:
    """Only the reference layers drop tokens, and the host waits for the number of those that are left."""
    field = "capacity_factors" if request.capacity_factors is not None else "model.moe.capacity_factor"
    if request.capacity_factors is not None:
        if request.model is None:
            reason = "other models drop tokens as their own code does"
            raise RuleError(f"capacity_factors need a model section, for target '{BEXP}': {reason}", field, "target")
        if request.model.moe is None:
            raise RuleError("capacity_factors given for a model without experts", field, "model.moe")
    if not request.space.drops_tokens:
        return
    if request.space.replays:
        raise RuleError(
            "experts with a capacity need execution 'eager' or 'compile': the host waits for the number of tokens that "
            "are kept, which no graph does",
            field,
            "execution",
        )


def check_back_ends(request: ExplorationRequest) -> None:
    """The back ends that are named are known of the target; which of them a device can use is the worker's to say."""
    target = request.target_name
    for field, what, names, known in (
        ("attention_backends", "attention", request.attention_backends, ATTENTION_OF.get(target, {OWN_ATTENTION})),
        ("expert_backends", "expert", request.expert_backends, EXPERTS_OF.get(target, frozenset())),
    ):
        for name in names or ():
            if name not in known | RECORDED_EXPERTS:
                there = f"there are {', '.join(sorted(known))}" if known else "its code chooses by itself"
                meant = did_you_mean(name, known)
                raise RuleError(f"target '{target}' has no {what} back end '{name}'{meant}; {there}", field, "target")


def check_attention_backends(request: ExplorationRequest) -> None:
    """The list of attention back ends is not undone by `flash_attention`."""
    named = request.attention_backends
    if named and all(map(is_flash, named)) and not request.flash_attention:
        raise RuleError(
            "attention_backends allows only flash, and flash_attention is false",
            "attention_backends",
            "flash_attention",
        )


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


RULES: tuple[Rule, ...] = (
    check_model_of_target,
    check_sequence_of_config,
    check_quantization,
    check_lengths,
    check_training_of_target,
    check_kernels,
    check_expert_modes,
    check_executions,
    check_sharing,
    check_largest_tile,
    check_experts,
    check_back_ends,
    check_capacity,
    check_sharding,
    check_attention_backends,
    check_micro_batch_sizes,
    check_tiles,
    check_policies,
    check_offload,
    check_numbered_policies,
    check_policies_of_mode,
    check_combinations,
    check_query_groups,
    check_trainer,
)
