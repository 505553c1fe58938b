"""A part of an Axolotl configuration, as YAML. Names as of Axolotl 0.19."""

from __future__ import annotations

from typing import Any

from bexp.explorer.exports.document import ExportDocument, yaml_export
from bexp.explorer.exports.framework import LIBRARY_ATTENTION, LIBRARY_EXPERTS, Framework
from bexp.explorer.exports.sharding_communication import gathering_notes, reduces_each_batch
from bexp.explorer.exports.trainer_settings import TrainerSettings
from bexp.explorer.exports.transformers import model_fields, precision_fields
from bexp.explorer.spec.candidate import Recompute
from bexp.explorer.spec.model import DType
from bexp.explorer.spec.training import Sharding

FRAMEWORK = Framework(title="Axolotl", attention=LIBRARY_ATTENTION, experts=LIBRARY_EXPERTS, chunked_loss=True)


def render(settings: TrainerSettings) -> ExportDocument:
    """Return the YAML. Axolotl turns bf16 on by itself, so that other formats turn it off."""
    values: dict[str, Any] = {
        "micro_batch_size": settings.micro_batch_size,
        "gradient_accumulation_steps": settings.grad_accum_steps,
        "bf16": settings.dtype is DType.BFLOAT16,
        **precision_fields(settings),
        "torch_compile": False,
        "gradient_checkpointing": settings.recompute is Recompute.FULL,
        **model_fields(settings),
    }
    if settings.recompute is Recompute.FULL:
        values["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    if settings.chunked_loss:
        values["chunked_cross_entropy"] = True
    if settings.sharding is not Sharding.NONE:
        values |= {
            "fsdp_version": 2,
            "fsdp_config": {
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "reshard_after_forward": settings.sharding is Sharding.ZERO3,
            },
        }
    if reduces_each_batch(settings):
        values["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    notes = ["add base_model, datasets and what decides the learning", *gathering_notes(settings)]
    return yaml_export(settings, values, notes)
