"""A part of a LLaMA-Factory configuration, as YAML. Names as of LLaMA-Factory 0.9.5."""

from __future__ import annotations

from typing import Any

from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.exports.document import WHAT_ELSE, ExportDocument, yaml_export
from bexp.explorer.exports.script import expert_notes, plain_expert_notes
from bexp.explorer.exports.sharding_communication import gathering_notes
from bexp.explorer.exports.trainer_settings import TrainerSettings
from bexp.explorer.exports.transformers import (
    batch_fields,
    optimizer_fields,
    order_fields,
    precision_fields,
    sharding_fields,
)
from bexp.explorer.model.model import DType
from bexp.explorer.trainers.trainer import TORCH_CHOICE

ATTENTION = {TORCH_CHOICE: "sdpa", "eager": "disabled", "flash_attention_2": "fa2", "flash_attention_3": "fa3"}


def render(settings: TrainerSettings) -> ExportDocument:
    """Return the YAML. LLaMA-Factory recomputes every layer unless it is told not to."""
    quantization, notes = _quantization(settings)
    values: dict[str, Any] = {
        **batch_fields(settings),
        "disable_gradient_checkpointing": settings.recompute is Recompute.NONE,
        "use_reentrant_gc": False,
        **optimizer_fields(settings),
        **precision_fields(settings),
        **sharding_fields(settings),
        **_adapters(settings),
        **quantization,
    }
    if settings.dtype is DType.BFLOAT16 and not settings.has_autocast:
        values["pure_bf16"] = True  # else it trains weights in float32
    if settings.states_length:
        values["cutoff_len"] = settings.seq_length
    if settings.batching is not None:
        packs = settings.batching == "packed"
        values |= {"packing": packs, "neat_packing": packs, **order_fields(settings)}
    if settings.attention is not None:
        values["flash_attn"] = ATTENTION[settings.attention]
    start = f"add model_name_or_path, dataset {WHAT_ELSE}"
    return yaml_export(settings, values, [start, *gathering_notes(settings), *notes, *expert_notes(settings)])


def _adapters(settings: TrainerSettings) -> dict[str, Any]:
    if settings.lora is None:
        return {"finetuning_type": "full"} if not settings.is_own_code else {}
    lora = settings.lora
    names = "all" if isinstance(lora.target_modules, str) else ",".join(lora.target_modules or ())
    alpha = int(lora.r if lora.alpha is None else lora.alpha)  # others are refused
    fields: dict[str, Any] = {
        "finetuning_type": "lora",
        "lora_rank": lora.r,
        "lora_alpha": alpha,
        "lora_target": names,
    }
    if lora.dropout:
        fields["lora_dropout"] = lora.dropout
    if lora.modules_to_save is not None:
        fields["additional_target"] = ",".join(lora.modules_to_save)
    return fields | {name: True for name in ("use_dora", "use_rslora") if getattr(lora, name)}


def _quantization(settings: TrainerSettings) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of quantised weights, and what LLaMA-Factory does to the others."""
    quantized = settings.quantization
    if quantized is None:
        return {}, []
    notes = [
        f"memory: LLaMA-Factory keeps the other weights in {settings.dtype}; they were measured in float32, as peft "
        "prepares them, so it needs less",
        *plain_expert_notes(settings),
    ]
    if quantized.is_own:
        return {}, notes  # it reads the checkpoint's own configuration
    fields: dict[str, Any] = {"quantization_bit": quantized.bits, "quantization_method": "bnb"}
    if quantized.bits == 4:
        fields |= {"quantization_type": "nf4", "double_quantization": True}
    return fields, notes
