"""A part of a LLaMA-Factory configuration, as YAML. Names as of LLaMA-Factory 0.9.5."""

from __future__ import annotations

from typing import Any

from bexp.explorer.exports.document import ExportDocument, yaml_export
from bexp.explorer.exports.framework import TORCH_CHOICE, Framework
from bexp.explorer.exports.sharding_communication import gathering_notes
from bexp.explorer.exports.trainer_settings import TrainerSettings
from bexp.explorer.exports.transformers import precision_fields, sharding_fields
from bexp.explorer.spec.candidate import Recompute

ATTENTION = {TORCH_CHOICE: "sdpa", "eager": "disabled", "flash_attention_2": "fa2", "flash_attention_3": "fa3"}
FRAMEWORK = Framework(title="LLaMA-Factory", attention=frozenset(ATTENTION))


def render(settings: TrainerSettings) -> ExportDocument:
    """Return the YAML. LLaMA-Factory recomputes every layer unless it is told not to."""
    values: dict[str, Any] = {
        "per_device_train_batch_size": settings.micro_batch_size,
        "gradient_accumulation_steps": settings.grad_accum_steps,
        "disable_gradient_checkpointing": settings.recompute is Recompute.NONE,
        "use_reentrant_gc": False,
        **precision_fields(settings),
        **sharding_fields(settings),
    }
    if settings.attention is not None:
        values["flash_attn"] = ATTENTION[settings.attention]
    return yaml_export(
        settings, values, ["add model_name_or_path, dataset and what decides the learning", *gathering_notes(settings)]
    )
