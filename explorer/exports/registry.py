"""The formats by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bexp.explorer.exports import (
    accelerate,
    axolotl,
    cerebras,
    deepspeed,
    lightning,
    llamafactory,
    megatron,
    python,
    torchtitan,
    transformers,
    trl,
)
from bexp.explorer.exports.document import ExportDocument
from bexp.explorer.exports.exploration import ExportSource, UnknownFormatError
from bexp.explorer.exports.trainer_settings import TrainerSettings, build_settings
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.search.trainer_terms import attention_name, find_missing, has_other_rows
from bexp.explorer.spec.candidate import Candidate
from bexp.explorer.spec.request import ExplorationRequest
from bexp.explorer.spec.trainer import TRAINERS, Trainer, TrainerName
from bexp.explorer.spec.training import Sharding


@dataclass(frozen=True, slots=True)
class Format:
    """A format: the trainer that reads it, and the function that writes it."""

    trainer: TrainerName
    render: Callable[[TrainerSettings], ExportDocument]


FORMATS = {
    "transformers": Format(TrainerName.TRANSFORMERS, transformers.render),
    "trl": Format(TrainerName.TRL, trl.render),
    "python": Format(TrainerName.BEXP, python.render),
    "accelerate": Format(TrainerName.ACCELERATE, accelerate.render),
    "deepspeed": Format(TrainerName.DEEPSPEED, deepspeed.render),
    "torchtitan": Format(TrainerName.TORCHTITAN, torchtitan.render_release),
    "torchtitan-main": Format(TrainerName.TORCHTITAN, torchtitan.render_main),
    "megatron": Format(TrainerName.MEGATRON, megatron.render),
    "lightning": Format(TrainerName.LIGHTNING, lightning.render),
    "axolotl": Format(TrainerName.AXOLOTL, axolotl.render),
    "llamafactory": Format(TrainerName.LLAMAFACTORY, llamafactory.render),
    "cerebras": Format(TrainerName.CEREBRAS, cerebras.render),
}


def find_format(name: str) -> Format:
    """Return the format called `name`. Raises UnknownFormatError with the names that there are."""
    if name not in FORMATS:
        raise UnknownFormatError(f"there is no format of this name; the formats are {', '.join(FORMATS)}")
    return FORMATS[name]


def formats_for(recommendation: Recommendation, request: ExplorationRequest | None = None) -> list[str]:
    """Return the names of the formats that can hold an answer to `request`, if it is known.

    Few trainers can be told a mesh of devices, or the capacity of experts, and some can be told neither LoRA nor what
    becomes of texts of unequal length, or pack a micro-batch otherwise than was measured. From an evaluation follows no
    training.
    """
    if request is not None and request.mode == "eval":
        return []
    lora = None if request is None else request.training.lora
    batching = None if request is None else request.batching_of_texts
    has_mesh = recommendation.plan is not None and not recommendation.plan.mesh.is_data_parallel
    drops = recommendation.candidate.capacity_factor is not None
    told = (recommendation.dividing or recommendation).candidate
    attention, size = attention_name(told, None), told.micro_batch_size
    return [
        name
        for name, known in FORMATS.items()
        if (not has_mesh or TRAINERS[known.trainer].meshes)
        and (not drops or TRAINERS[known.trainer].capacity)
        and TRAINERS[known.trainer].lacks_adapters(lora) is None
        and (batching is None or batching in TRAINERS[known.trainer].batchings)
        and (request is None or not has_other_rows(TRAINERS[known.trainer], request, attention, size))
        and (request is None or not _lacks_what_is_fixed(TRAINERS[known.trainer], told, request))
    ]


def _lacks_what_is_fixed(trainer: Trainer, told: Candidate, request: ExplorationRequest) -> bool:
    """Whether the trainer cannot be told the optimizer, or what the answer has in common with all that was explored."""
    fixed = {"optimizer"}
    if min(request.devices.context_parallel_sizes, default=1) > 1:
        fixed.add("context_parallel")
    if Sharding.NONE not in request.space.sharding_choices:
        fixed.add("adapters")
    return not fixed.isdisjoint(find_missing(trainer, told, request, None))


def export(name: str, exploration: ExportSource) -> ExportDocument:
    """Return the file of an exploration's answer in the format called `name`.

    Raises UnknownFormatError if there is no such format, ExportError if there is no answer that a trainer could run.
    """
    known = find_format(name)
    return known.render(build_settings(known.trainer, name, exploration))
