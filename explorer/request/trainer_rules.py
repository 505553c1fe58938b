"""The rule that an answer for a trainer asks for nothing that this trainer cannot be told, and a trainer's defaults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bexp.explorer.dimensions.kernels import Kernels
from bexp.explorer.dimensions.loss import LOSS
from bexp.explorer.model.base import RuleError
from bexp.explorer.model.model import DType
from bexp.explorer.model.target import BEXP, TRANSFORMERS
from bexp.explorer.model.training import OptimizerSpec, Precision
from bexp.explorer.trainers.trainer import (
    DEFAULT_EXPERTS,
    TORCH_KERNELS,
    TRAINERS,
    Trainer,
    TrainerName,
    library_experts,
)

if TYPE_CHECKING:
    from bexp.explorer.request.request import ExplorationRequest


def expand_trainer(data: dict[str, Any]) -> dict[str, Any]:
    """Fill in what the named trainer decides and the request does not state: precision, loss, and allocator."""
    name = data.get("trainer")
    if not isinstance(name, str) or name not in list(TrainerName):
        return data
    trainer, training = TRAINERS[TrainerName(name)], data.get("training")
    filled = {"allocator": trainer.allocator, **data}
    if training is not None and not isinstance(training, dict):
        return filled
    training = dict(training or {})
    if data.get("hf_config") is not None:
        if training.get("lora") is None and data.get("target") in (None, TRANSFORMERS):
            training.setdefault("precision", _default_precision(trainer, data, training))
    elif data.get("model") is not None:
        if "chunked" not in trainer.losses:
            _fill(training, "loss", "kind", "full")
        if not trainer.keeps_float32:
            _fill(training, "optimizer", "master_dtype", None)
    return {**filled, "training": training} if training else filled


def _fill(training: dict[str, Any], part: str, field: str, value: Any) -> None:
    """Set a field of a part of `training` that states nothing else; a part that is no mapping is refused later."""
    stated = training.get(part)
    if stated is None or (isinstance(stated, dict) and field not in stated):
        training[part] = {**(stated or {}), field: value}


def _default_precision(trainer: Trainer, data: dict[str, Any], training: dict[str, Any]) -> Precision:
    """Return what a trainer keeps: where it casts nothing to float32, the next of its precisions."""
    named = data.get("attention_backends")
    is_cast = isinstance(named, list) and not any(str(name) in trainer.upcast_attention for name in named)
    is_sharded = training.get("sharding") not in (None, "none") or data.get("sharding_levels") is not None
    return trainer.precisions[trainer.precisions[0] == "upcast" and bool(is_cast or is_sharded)]


def check_trainer(request: ExplorationRequest) -> None:
    """The named trainer can be told what the request names, so that the recommendation is what its export says."""
    if request.trainer is None:
        return
    trainer = TRAINERS[request.trainer]
    for field, words in _beyond(request, trainer):
        able = [name for name, other in TRAINERS.items() if field not in {f for f, _ in _beyond(request, other)}]
        hint = f"; these can: {', '.join(able)}" if able else ""
        raise RuleError(f"{trainer.title} cannot be told {words}{hint}", field, "trainer")


def _beyond(request: ExplorationRequest, trainer: Trainer) -> Iterator[tuple[str, str]]:
    """Yield the fields that name something which a trainer cannot be told, each with what that is."""
    yield from _beyond_a_layer(request, trainer)
    yield from _beyond_a_step(request, trainer)
    yield from _beyond_a_device(request, trainer)


def _beyond_a_layer(request: ExplorationRequest, trainer: Trainer) -> Iterator[tuple[str, str]]:
    for policy in request.recompute or ():
        if not trainer.has_policy(policy):
            yield "recompute", f"the recomputation policy '{policy}'"
    if request.bta.is_named and not trainer.tiles:
        yield "bta", "attention tiles"
    for name in request.attention_backends or ():
        if name not in TORCH_KERNELS and name.removeprefix("sdpa:") not in trainer.attention:
            yield "attention_backends", f"the attention kernel '{name}'"
    for name in request.expert_backends or ():
        if name not in DEFAULT_EXPERTS and library_experts(name) not in trainer.experts:
            yield "expert_backends", f"the expert kernels '{name}'"
    if Kernels.LIGER in (request.kernels or ()) and not trainer.liger:
        yield "kernels", "the kernels of liger"
    if request.space.drops_tokens and not trainer.capacity:
        yield "capacity_factors", "a capacity factor of experts"


def _beyond_a_step(request: ExplorationRequest, trainer: Trainer) -> Iterator[tuple[str, str]]:
    training = request.training
    if request.model is not None and training.loss.kind == "chunked" and "chunked" not in trainer.losses:
        yield "training.loss", "a loss in chunks"
    for loss in request.losses or ():
        if loss not in trainer.losses:
            yield "losses", LOSS.words(loss)
    field = "execution" if request.executions is None else "executions"
    for execution in request.space.executions:
        if (execution.compiles and not trainer.compiled_layers) or (execution.replays and not trainer.graphs):
            yield field, f"execution '{execution}'"
    if not trainer.has_optimizer(training.optimizer.of_library):
        yield "training.optimizer.name", f"the optimizer '{training.optimizer.name}'"
    if (lacking := trainer.lacks_adapters(training.lora)) is not None:
        yield "training.lora", lacking
    if (batching := request.batching_of_texts) is not None and batching not in trainer.batchings:
        yield "batching" if request.batching else "lengths", f"{batching} texts"
    library = request.hf_config is not None and request.target_name == TRANSFORMERS
    if library and training.lora is None and training.precision not in trainer.precisions:
        yield "training.precision", f"precision '{training.precision}'"
    if request.model is not None and request.model.dtype is not DType.FLOAT32:
        keeps = training.optimizer.master_dtype is not None
        if keeps and not trainer.keeps_float32:
            yield "training.optimizer.master_dtype", "float32 master weights"
        if not keeps and "pure" not in trainer.precisions:
            yield "training.optimizer.master_dtype", "training without float32 master weights"
    if request.model is not None and request.target_name == BEXP:
        yield from _beyond_the_formats(training.optimizer, request.model.dtype, trainer)


def _beyond_the_formats(optimizer: OptimizerSpec, dtype: DType, trainer: Trainer) -> Iterator[tuple[str, str]]:
    wide: Precision = "autocast" if "master" not in trainer.precisions and trainer.keeps_float32 else "master"
    gradients, states = trainer.kept_formats(dtype, wide if optimizer.has_master(dtype) else "pure")
    if optimizer.state_dtype not in (None, states):
        yield "training.optimizer.state_dtype", f"optimizer states in {optimizer.state_dtype}"
    if optimizer.grad_dtype not in (None, gradients):
        yield "training.optimizer.grad_dtype", f"gradients in {optimizer.grad_dtype}"


def _beyond_a_device(request: ExplorationRequest, trainer: Trainer) -> Iterator[tuple[str, str]]:
    levels, given = request.sharding_levels, request.training.sharding
    named = (given,) if levels is None else () if levels == "explore" else levels
    field = "training.sharding" if levels is None else "sharding_levels"
    for level in named:
        if level not in trainer.sharding:
            yield field, f"the sharding level '{level}'"
        elif trainer.lacks_sharded_adapters(request.training.lora, level):
            yield field, f"LoRA with the sharding level '{level}'"
    if max(request.devices.context_parallel_sizes, default=1) > 1 and not trainer.layouts:
        yield "context_parallel.sizes", "devices that share a sequence"
    if request.devices.is_mesh and not trainer.meshes:
        yield "parallelism", "a mesh of devices"
