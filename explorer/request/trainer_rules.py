"""The rules of a named trainer: its defaults, and that a request names nothing that the trainer cannot express."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bexp.explorer.dimensions.candidate import DIMENSIONS
from bexp.explorer.dimensions.context_parallel import Sharing
from bexp.explorer.dimensions.sharding import SHARDING
from bexp.explorer.model.base import RuleError
from bexp.explorer.model.model import DType
from bexp.explorer.model.target import BEXP, TRANSFORMERS
from bexp.explorer.model.training import OptimizerSpec, Precision
from bexp.explorer.trainers.registry import TRAINERS
from bexp.explorer.trainers.trainer import ShardedAdapters, SteppedWeights, Trainer

if TYPE_CHECKING:
    from bexp.explorer.request.request import ExplorationRequest


def expand_trainer(data: dict[str, Any]) -> dict[str, Any]:
    """Fill in precision, loss and allocator as the named trainer decides them, where the request states none."""
    name = data.get("trainer")
    if not isinstance(name, str) or name not in TRAINERS:
        return data
    trainer, training = TRAINERS[name], data.get("training")
    filled = {"allocator": trainer.allocator, **data}
    if training is not None and not isinstance(training, dict):
        return filled
    training = dict(training or {})
    if data.get("hf_config") is not None:
        if training.get("lora") is None and data.get("target") in (None, TRANSFORMERS):
            training.setdefault("precision", _default_precision(trainer, data, training))
    elif data.get("model") is not None:
        if trainer.lacks("loss", "chunked"):
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
    """Return the precision that a trainer trains with; the next of its precisions if it casts nothing to float32."""
    named = data.get("attention_backends")
    is_cast = isinstance(named, list) and not any(str(name) in trainer.upcast_attention for name in named)
    is_sharded = training.get("sharding") not in (None, "none") or data.get("sharding_levels") is not None
    return trainer.precisions[trainer.precisions[0] == "upcast" and bool(is_cast or is_sharded)]


def check_trainer(request: ExplorationRequest) -> None:
    """Check that the named trainer can express what the request names, so that its export says what is recommended."""
    if request.trainer is None:
        return
    trainer = request.runner
    for field, words in _beyond(request, trainer):
        able = [name for name, other in TRAINERS.items() if field not in {f for f, _ in _beyond(request, other)}]
        hint = f"; these can: {', '.join(able)}" if able else ""
        raise RuleError(f"{trainer.title} cannot express {words}{hint}", field, "trainer")


def _beyond(request: ExplorationRequest, trainer: Trainer) -> Iterator[tuple[str, str]]:
    """Yield the fields that name something which a trainer cannot express, each with a description of that."""
    for field, term, value in _named_values(request):
        if term == SHARDING.name and request.by_deepspeed and trainer.has_deepspeed:
            continue  # DeepSpeed has all levels
        if (words := trainer.lacks(term, value)) is not None:
            yield field, words
    yield from _beyond_its_layouts(request, trainer)
    yield from _beyond_its_formats(request, trainer)


def stepped_weights(request: ExplorationRequest, *, has_experts: bool = False) -> SteppedWeights:
    """Return the optimizer, and whether it steps experts in one tensor: adapters are matrices.

    A model is known to have experts by its description, or `has_experts` as its worker has built it.
    """
    training, has_experts = request.training, has_experts or request.explored.names_experts
    return SteppedWeights(training.optimizer, has_experts and training.lora is None)


def _named_values(request: ExplorationRequest) -> Iterator[tuple[str, str, Any]]:
    """Yield the named values of a request, each with its field and the trainer's term for it."""
    training = request.training
    place = request.space.place
    for dimension in DIMENSIONS:
        yield from ((field, dimension.name, value) for field, value in dimension.named_for_trainer(place))
    if request.space.drops_tokens:
        yield "capacity_factors", "capacity_factor", True
    yield "training.optimizer.name", "optimizer", stepped_weights(request)
    yield "training.lora", "adapters", training.lora
    yield "batching" if request.batching else "lengths", "batching", request.batching_of_texts
    for field, level in SHARDING.named_for_trainer(place):
        yield field, "sharded_adapters", ShardedAdapters(training.lora, level)
    yield "parallelism", "parallelism", request.devices.share_model


def _beyond_its_layouts(request: ExplorationRequest, trainer: Trainer) -> Iterator[tuple[str, str]]:
    """Yield a reason if no layout is left in which devices may share a sequence."""
    size = max(request.devices.context_parallel_sizes, default=1)
    lacking = [trainer.lacks("context_parallel", Sharing(size, one)) for one in request.context_parallel.layouts]
    if size > 1 and None not in lacking:
        yield "context_parallel.sizes", "devices that share a sequence"


def _beyond_its_formats(request: ExplorationRequest, trainer: Trainer) -> Iterator[tuple[str, str]]:
    """Yield the number formats that a trainer does not keep."""
    training, model = request.training, request.model
    library = request.hf_config is not None and request.target_name == TRANSFORMERS
    level, by_deepspeed = request.space.highest_sharding, request.by_deepspeed
    kept = trainer.keeps(training.precision, level, by_deepspeed=by_deepspeed)
    if library and training.lora is None and not kept:
        yield "training.precision", f"precision '{training.precision}'"
    if model is None:
        return
    if model.dtype is not DType.FLOAT32:
        keeps = training.optimizer.master_dtype is not None
        if keeps and not trainer.keeps_float32:
            yield "training.optimizer.master_dtype", "float32 master weights"
        if not keeps and "pure" not in trainer.precisions:
            yield "training.optimizer.master_dtype", "training without float32 master weights"
    if request.target_name == BEXP:
        yield from _beyond_its_states(training.optimizer, model.dtype, trainer)


def _beyond_its_states(optimizer: OptimizerSpec, dtype: DType, trainer: Trainer) -> Iterator[tuple[str, str]]:
    wide: Precision = "autocast" if "master" not in trainer.precisions and trainer.keeps_float32 else "master"
    gradients, states = trainer.kept_formats(dtype, wide if optimizer.has_master(dtype) else "pure")
    if optimizer.state_dtype not in (None, states):
        yield "training.optimizer.state_dtype", f"optimizer states in {optimizer.state_dtype}"
    if optimizer.grad_dtype not in (None, gradients):
        yield "training.optimizer.grad_dtype", f"gradients in {optimizer.grad_dtype}"
