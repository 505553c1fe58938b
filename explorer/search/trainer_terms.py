"""A candidate in the terms of a trainer: the parts that it cannot express, and the formats that can hold it."""

from __future__ import annotations

from typing import Any

from bexp.explorer.dimensions.attention import ATTENTION, TORCH_CHOICE, TORCH_KERNELS, attention_name
from bexp.explorer.dimensions.candidate import DIMENSIONS, Candidate
from bexp.explorer.dimensions.loss import LOSS, LOSSES
from bexp.explorer.dimensions.place import Place
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.dimensions.sharding import SHARDING
from bexp.explorer.model.model import DType
from bexp.explorer.model.target import BEXP, TRANSFORMERS
from bexp.explorer.model.training import Precision, Sharding
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.request.request import ExplorationRequest, place_of
from bexp.explorer.request.trainer_rules import stepped_weights
from bexp.explorer.trainers.registry import TRAINERS
from bexp.explorer.trainers.trainer import ShardedAdapters, Trainer


def needs_logits(trainer: Trainer, candidate: Candidate, request: ExplorationRequest) -> bool:
    """Whether a trainer holds the logits of all tokens where a candidate was measured without."""
    loss = LOSS.asked_of_trainer(candidate, request.space.place)
    return LOSSES[trainer.nearest_loss(loss)].holds_logits and not LOSSES[loss].holds_logits


def compute_dtype(request: ExplorationRequest, report: DeviceReport | None) -> DType:
    """Return the number format of the matrix products."""
    parts = None if report is None else report.parts
    return request.explored.dtype or (DType.BFLOAT16 if parts is None else parts.dtype)


def measured_precision(request: ExplorationRequest, report: DeviceReport | None) -> Precision:
    """Return the precision that was measured; the reference layers have master weights unless the request has none."""
    if request.target_name == BEXP:
        return "master" if request.training.optimizer.has_master(compute_dtype(request, report)) else "pure"
    return request.training.precision


def precision_of(
    trainer: Trainer, request: ExplorationRequest, report: DeviceReport | None, candidate: Candidate
) -> Precision:
    """Return the precision to set in a trainer: the measured one if it has that, else the nearest that it has.

    Adapters, weights in float32 and a person's own code stay as they were measured. A trainer that casts parts of a
    model to float32 decides that by the candidate's attention and sharding.
    """
    measured = measured_precision(request, report)
    is_float32 = compute_dtype(request, report) is DType.FLOAT32
    if request.training.lora is not None or request.is_own_code or is_float32:
        return measured
    level = candidate.sharding or request.training.sharding
    if request.by_deepspeed and trainer.has_deepspeed:
        return "master"
    if trainer.upcast_attention and request.target_name == BEXP:
        return "pure"  # the reference layers cast nothing
    is_whole = level is Sharding.NONE
    if trainer.upcast_attention and not (is_whole and measured == "master"):
        name = attention_name(candidate, report) or TORCH_CHOICE
        is_upcast = is_whole and (name in TORCH_KERNELS or name in trainer.upcast_attention)
        return "upcast" if is_upcast else "pure"
    if trainer.keeps(measured, level, by_deepspeed=False):
        return measured
    return "autocast" if measured == "master" and "autocast" in trainer.precisions else trainer.precisions[0]


def halves_experts(trainer: Trainer, report: DeviceReport | None) -> bool:
    """Whether experts stayed plain next to quantised weights, and a trainer keeps them in half precision."""
    weights = () if report is None or report.parts is None else report.parts.weights
    return trainer.halves_experts and any(one.kind == "experts" and not one.quantized_bytes for one in weights)


def lost_formats(
    trainer: Trainer, request: ExplorationRequest, report: DeviceReport | None, candidate: Candidate
) -> list[str]:
    """Return the number formats of gradients and moments that the request states and a trainer keeps otherwise."""
    if request.target_name != BEXP:
        return []
    optimizer, kept = request.training.optimizer, precision_of(trainer, request, report, candidate)
    gradients, states = trainer.kept_formats(compute_dtype(request, report), kept)
    stated = (("gradients", optimizer.grad_dtype, gradients), ("optimizer states", optimizer.state_dtype, states))
    return [f"{what} in {asked}" for what, asked, has in stated if asked not in (None, has)]


def keeps_other_formats(
    trainer: Trainer, request: ExplorationRequest, report: DeviceReport | None, candidate: Candidate
) -> bool:
    """Whether a trainer keeps other number formats than were measured, so that its speed is not known."""
    halves = trainer.halves_adapters or trainer.halves_shell or halves_experts(trainer, report)
    if request.quantized is not None and halves:
        return True
    return precision_of(trainer, request, report, candidate) != measured_precision(request, report)


def find_missing(
    trainer: Trainer,
    candidate: Candidate,
    request: ExplorationRequest,
    report: DeviceReport | None,
    place: Place | None = None,
) -> dict[str, str]:
    """Return what `trainer` cannot express of `candidate`, in words, by the names of terms.

    `offload` is apart from `recompute`, because no other policy is known to need as little memory. Who asks for many
    candidates makes the `place` of `request` and `report` once.
    """
    place = place or place_of(request, report=report)
    asked: dict[str, Any] = {
        dimension.name: dimension.asked_of_trainer(candidate, place)
        for dimension in DIMENSIONS
        if dimension.term is not None
    }
    attention, sharding = asked[ATTENTION.name], asked[SHARDING.name]
    asked |= {
        "sharded_adapters": ShardedAdapters(request.training.lora, sharding),
        "optimizer": stepped_weights(request, has_experts=candidate.expert_backend is not None),
    }
    if request.by_deepspeed and trainer.has_deepspeed:
        del asked[SHARDING.name]  # DeepSpeed has all levels
    missing = {term: words for term, value in asked.items() if (words := trainer.lacks(term, value)) is not None}
    if candidate.recompute is Recompute.OFFLOAD and "recompute" in missing:
        missing["offload"] = missing.pop("recompute")
    if _is_other_precision(trainer, request, report, candidate):
        precision = request.training.precision
        missing["precision"] = f"precision '{precision}' with attention '{attention}' and sharding '{sharding}'"
    if has_other_rows(trainer, request, attention, candidate.micro_batch_size):
        missing["rows"] = (
            f"packed rows as attention '{attention}' was measured with them, at micro-batch "
            f"{candidate.micro_batch_size}"
        )
    return missing


def answer_refusal(trainer: Trainer, recommendation: Recommendation, request: ExplorationRequest | None) -> str | None:
    """Return what `trainer` cannot express of an answer and of all that was explored with it, in words.

    Without the request, what the answer alone says.
    """
    asked: dict[str, Any] = {
        "capacity_factor": recommendation.candidate.capacity_factor,
        "parallelism": recommendation.is_shared,
    }
    if request is not None:
        asked |= {"adapters": request.training.lora, "batching": request.batching_of_texts}
    return next((words for term, value in asked.items() if (words := trainer.lacks(term, value)) is not None), None)


def formats_for(recommendation: Recommendation, request: ExplorationRequest | None = None) -> list[str]:
    """Return the names of the formats that can hold an answer to `request`, if it is known.

    From an evaluation follows no training, and from a batch that nothing divides no step.
    """
    if request is not None and (request.mode == "eval" or _leaves_a_rest(recommendation, request)):
        return []
    able = (trainer for trainer in TRAINERS.values() if _can_hold(trainer, recommendation, request))
    return [name for trainer in able for name in trainer.formats]


def own_formats(recommendation: Recommendation, request: ExplorationRequest | None) -> list[str]:
    """Return those of `formats_for` that the trainer reads which the request names; all of them if it names none."""
    able = formats_for(recommendation, request)
    if request is None or request.trainer is None:
        return able
    return [name for name in request.runner.formats if name in able]


def _leaves_a_rest(recommendation: Recommendation, request: ExplorationRequest) -> bool:
    """Whether a stated batch is divided by no candidate that fits."""
    if request.batch_size is None or recommendation.plan is not None:
        return False
    own = recommendation.for_batch.candidate
    groups = request.devices.data_parallel_size(own.context_parallel_size)
    return request.batch_size % (own.micro_batch_size * groups) != 0


def _can_hold(trainer: Trainer, recommendation: Recommendation, request: ExplorationRequest | None) -> bool:
    """Whether a trainer can express what the answer has in common with all that was explored."""
    if answer_refusal(trainer, recommendation, request) is not None:
        return False
    if request is None:
        return True
    own, fixed = recommendation.for_batch.candidate, {"optimizer"}
    if has_other_rows(trainer, request, attention_name(own, None), own.micro_batch_size):
        return False
    if min(request.devices.context_parallel_sizes, default=1) > 1:
        fixed.add("context_parallel")
    if Sharding.NONE not in request.space.sharding_choices:
        fixed.add("sharded_adapters")
    return fixed.isdisjoint(find_missing(trainer, own, request, None))


def has_other_rows(trainer: Trainer, request: ExplorationRequest, attention: str | None, size: int) -> bool:
    """Whether the trainer packs a micro-batch of `size` otherwise than was measured, or not at all.

    It makes one row where several were measured, or the reverse; or its attention takes no micro-batch so large.
    """
    if request.batching != "packed":
        return False
    if attention is not None and size > trainer.largest_packed.get(attention, size):
        return True
    if (attention or "").startswith("flash_attention"):
        return False
    return trainer.flattens is not request.flattens


def _is_other_precision(
    trainer: Trainer, request: ExplorationRequest, report: DeviceReport | None, candidate: Candidate
) -> bool:
    """Whether the trainer that was asked for keeps a candidate's weights in other formats than those measured."""
    if not trainer.upcast_attention or request.runner is not trainer or request.target_name != TRANSFORMERS:
        return False
    return precision_of(trainer, request, report, candidate) != request.training.precision
