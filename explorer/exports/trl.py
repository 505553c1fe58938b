"""Fields of TRL's `SFTConfig`, as JSON for `SFTConfig(**fields)` or TrlParser. Names as of TRL 1.9."""

from __future__ import annotations

from typing import Any

from bexp.explorer.exports import transformers
from bexp.explorer.exports.document import ExportDocument
from bexp.explorer.exports.script import plain_expert_notes
from bexp.explorer.exports.trainer_settings import TrainerSettings
from bexp.explorer.trainers.trainer import HALF_NAMES


def render(settings: TrainerSettings) -> ExportDocument:
    """Return the JSON: TrainingArguments, with the length of a sequence and what becomes of texts.

    Best-fit packing keeps documents apart by flattening a micro-batch into one row.
    """
    packs = settings.batching == "packed"
    values: dict[str, Any] = {"packing": packs, "padding_free": packs}
    if packs:
        values["packing_strategy"] = "bfd"
    if not settings.is_own_code:
        values["loss_type"] = "nll"  # of full logits; its default computes them in chunks
    if not settings.has_autocast:
        values |= dict.fromkeys(HALF_NAMES.values(), False)  # it computes under autocast unless it is told not to
    if settings.states_length:
        values["max_length"] = settings.seq_length
    return transformers.render(settings, values, _precision_notes(settings))


def _precision_notes(settings: TrainerSettings) -> list[str]:
    """Return what TRL does to the number formats beside quantised weights that was not measured."""
    if settings.quantization is None:
        return []
    return [
        "memory: TRL casts what it trains of a quantised model to bfloat16 (adapters, modules_to_save); it was "
        "measured in float32, so it needs less",
        *plain_expert_notes(settings),
    ]
