"""Every rule between the fields of a request, in order: one function a rule, each with the fields that it relates.

A rule may rely on the rules before it. The rules of a named trainer stand in `trainer_rules`, and those of an
extension in its package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

from bexp.explorer.dimensions.candidate import DIMENSIONS
from bexp.explorer.dimensions.combinations import check_combinations
from bexp.explorer.dimensions.expert_modes import ExpertMode
from bexp.explorer.model.base import RuleError
from bexp.explorer.model.extensions import extensions
from bexp.explorer.model.model import DType
from bexp.explorer.model.optimizers import BITSANDBYTES, MUON
from bexp.explorer.model.quantization import PLAIN, Quantization, own_method
from bexp.explorer.model.spelling import shortened
from bexp.explorer.model.target import BEXP, TRANSFORMERS
from bexp.explorer.model.training import Sharding
from bexp.explorer.request.trainer_rules import check_trainer, stepped_weights
from bexp.explorer.trainers.keys import IN_A_COMMAND

if TYPE_CHECKING:
    from bexp.explorer.request.request import ExplorationRequest

Rule = Callable[["ExplorationRequest"], None]
"""Raises RuleError for a request that breaks it."""

OWN = "hf_config.quantization_config"
PLAIN_WEIGHTS = f"quantization: {PLAIN} measures plain weights"


def check_expert_modes(request: ExplorationRequest) -> None:
    """Check the modes that a request names, and their numbers.

    Raises RuleError if experts are on one device alone, more of them are shadowed than there are, or a number is
    given for another mode.
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


def _need_library(request: ExplorationRequest, what: str, field: str) -> None:
    """Raise RuleError unless the target is the transformers library, which `what` needs."""
    if request.target_name != TRANSFORMERS:
        raise RuleError(f"{what} target '{TRANSFORMERS}'", field, "target")


def check_quantization(request: ExplorationRequest) -> None:
    """Check that quantised weights are a transformers model's, whole on a device, and trained by adapters alone."""
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
    """Check that a checkpoint that is quantised already is loaded as it is."""
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
            "weights that are not quantised are in float32, as peft prepares them: leave precision out",
            "training.precision",
            field,
        )
    if request.space.highest_sharding is not Sharding.NONE:
        reason = f"quantised weights are measured without sharding: leave it out, or {IN_A_COMMAND}"
        raise RuleError(reason, field, "training.sharding")


def check_lengths(request: ExplorationRequest) -> None:
    """Check that texts of unequal length run eagerly on one device, with classes of the transformers library."""
    if request.lengths is None:
        if request.batching is not None:
            raise RuleError("batching needs lengths: without them every sequence is full", "batching", "lengths")
        return
    _need_library(request, "texts of unequal length need", "lengths")
    if request.num_devices > 1:
        raise RuleError("texts of unequal length are measured on one device", "lengths", "num_devices")


def check_model_of_target(request: ExplorationRequest) -> None:
    """Check that `bexp` has a model and `transformers` a config.json, and that no target has both."""
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
    """Check that a config.json and the length to train come together: the file says what lengths the model can take."""
    if (request.hf_config is None) is not (request.hf_seq_length is None):
        raise RuleError("hf_seq_length and hf_config are given together, or neither is", "hf_seq_length", "hf_config")


def check_training_of_target(request: ExplorationRequest) -> None:
    """Check precision, LoRA and the optimizer: the reference layers have no LoRA, and precision `pure` alone."""
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
    """Check that precision `master` is for all weights of a transformers model, and fits the optimizer's formats."""
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
    """Check that an optimizer of a library steps whole parameters in a format of its own, of a transformers model.

    The reference layers have Muon as well, with master weights or without.
    """
    field, name = "training.optimizer.name", request.training.optimizer.name
    known = request.training.optimizer.of_library
    if name != MUON or request.target_name != BEXP:
        _need_library(request, f"optimizer '{name}' needs", field)
    if request.devices.share_model:
        raise RuleError(f"optimizer '{name}' is measured on whole models", field, "parallelism")
    if known is not None and known.is_on_host and (request.num_devices > 1 or request.device_kind == "cpu"):
        other = "num_devices" if request.num_devices > 1 else "device_kind"
        raise RuleError(f"optimizer '{name}' steps in the host's memory, next to one GPU", field, other)
    if request.runner.lacks("optimizer", stepped_weights(request)):
        return  # the trainer cannot express it, whatever its precision
    other = f"say adamw_torch_fused, or {IN_A_COMMAND}"
    if request.training.precision == "master":
        reason = f"optimizer '{name}' is measured without float32 master weights: {other}"
        raise RuleError(reason, field, "training.precision")
    if request.space.highest_sharding is not Sharding.NONE:
        raise RuleError(f"optimizer '{name}' is measured without sharding: {other}", field, "training.sharding")
    optimizer = request.training.optimizer
    for part in ("grad_dtype", "state_dtype"):
        if getattr(optimizer, part) is not None:
            raise RuleError(f"optimizer '{name}' decides its formats by itself: leave {part} out", field)


def _check_float8(request: ExplorationRequest) -> None:
    """Check that float8 is for all weights of a transformers model on one device."""
    field, precision = "training.precision", request.training.precision
    _need_library(request, f"precision '{precision}' needs", field)
    if request.training.lora is not None:
        raise RuleError(f"precision '{precision}' is measured without LoRA", field, "training.lora")
    if request.num_devices > 1:
        raise RuleError(f"precision '{precision}' is measured on one device", field, "num_devices")
    if request.mode != "train":
        raise RuleError(f"precision '{precision}' is one of training", field, "mode")


def _check_upcast(request: ExplorationRequest) -> None:
    """Check that precision `upcast` is for its one trainer, and all weights of a transformers model on one device."""
    field = "training.precision"
    _need_library(request, "precision 'upcast' needs", field)
    if not request.runner.upcast_attention:
        raise RuleError("precision 'upcast' is measured for trainer 'axolotl' alone", field, "trainer")
    if request.training.lora is not None or request.space.highest_sharding is not Sharding.NONE:
        where = "training.lora" if request.training.lora is not None else "training.sharding"
        raise RuleError("Axolotl casts nothing to float32 with LoRA or sharding: use precision 'pure'", field, where)


def check_routing(request: ExplorationRequest) -> None:
    """Check that the routing of a model with experts can be drawn."""
    if request.model is not None and request.model.moe is not None:
        request.routing.check(request.model.moe)


def check_capacity(request: ExplorationRequest) -> None:
    """Check that only the reference layers drop tokens, and not in graphs: the host waits for their number."""
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


def check_query_groups(request: ExplorationRequest) -> None:
    """Check that each variant's number of query groups divides the heads."""
    if request.num_query_groups is None:
        return
    if request.model is None:
        raise RuleError("num_query_groups needs a model section, whose heads it divides", "num_query_groups")
    heads = request.model.num_attention_heads
    for groups in request.num_query_groups:
        if groups is not None and heads % groups:
            message = f"num_query_groups ({groups}) must divide num_attention_heads ({heads})"
            raise RuleError(message, "num_query_groups", "model.num_attention_heads")


def check_dimensions(request: ExplorationRequest) -> None:
    """Check that the dimensions admit what the request says of them."""
    place = request.space.place
    for dimension in reversed(DIMENSIONS):
        dimension.check(place)
    check_combinations(place)


RULES: tuple[Rule, ...] = (
    check_model_of_target,
    check_sequence_of_config,
    check_quantization,
    check_lengths,
    check_training_of_target,
    check_dimensions,
    check_expert_modes,
    check_routing,
    check_capacity,
    check_query_groups,
    check_trainer,
)


class RequestExtension(Protocol):
    """The interface of an extension to requests."""

    def rules_for(self, request: ExplorationRequest) -> tuple[Rule, ...] | None:
        """Return the rules of a request that names something of this package; None if it names nothing."""


def rules_of(request: ExplorationRequest) -> tuple[Rule, ...]:
    """Return the rules of the first extension that has some for a request, else those of the core."""
    rules = (cast(RequestExtension, one).rules_for(request) for one in extensions())
    return next((each for each in rules if each is not None), RULES)
