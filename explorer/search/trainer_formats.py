"""The export formats that can hold an answer: those of the trainers that can be told what it depends on."""

from __future__ import annotations

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.training import Sharding
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.trainer_terms import attention_name, find_missing, has_other_rows
from bexp.explorer.trainers.trainer import TRAINERS, Trainer


def formats_for(recommendation: Recommendation, request: ExplorationRequest | None = None) -> list[str]:
    """Return the names of the formats that can hold an answer to `request`, if it is known.

    Few trainers can be told a mesh of devices, or the capacity of experts, and some can be told neither LoRA nor what
    becomes of texts of unequal length, or pack a micro-batch otherwise than was measured. From an evaluation follows no
    training, and from a batch that nothing divides no step.
    """
    if request is not None and (request.mode == "eval" or _leaves_a_rest(recommendation, request)):
        return []
    able = (one for one in TRAINERS.values() if _can_be_told(one, recommendation, request))
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
    told = recommendation.for_batch.candidate
    groups = request.devices.data_parallel_size(told.context_parallel_size)
    return request.batch_size % (told.micro_batch_size * groups) != 0


def _can_be_told(trainer: Trainer, recommendation: Recommendation, request: ExplorationRequest | None) -> bool:
    has_mesh = recommendation.plan is not None and not recommendation.plan.mesh.is_data_parallel
    drops = recommendation.candidate.capacity_factor is not None
    if (has_mesh and not trainer.meshes) or (drops and not trainer.capacity):
        return False
    if request is None:
        return True
    told, batching = recommendation.for_batch.candidate, request.batching_of_texts
    return (
        trainer.lacks_adapters(request.training.lora) is None
        and (batching is None or batching in trainer.batchings)
        and not has_other_rows(trainer, request, attention_name(told, None), told.micro_batch_size)
        and not _lacks_what_is_fixed(trainer, told, request)
    )


def _lacks_what_is_fixed(trainer: Trainer, told: Candidate, request: ExplorationRequest) -> bool:
    """Whether the trainer cannot be told the optimizer, or what the answer has in common with all that was explored."""
    fixed = {"optimizer"}
    if min(request.devices.context_parallel_sizes, default=1) > 1:
        fixed.add("context_parallel")
    if Sharding.NONE not in request.space.sharding_choices:
        fixed.add("adapters")
    return not fixed.isdisjoint(find_missing(trainer, told, request, None))
