"""A part of an Axolotl configuration, as YAML. Names as of Axolotl 0.21."""

from __future__ import annotations

from typing import Any

from bexp.explorer.exports.document import ExportDocument, yaml_export
from bexp.explorer.exports.sharding_communication import gathering_notes, reduces_each_batch
from bexp.explorer.exports.trainer_settings import TrainerSettings
from bexp.explorer.exports.transformers import model_fields, optimizer_fields
from bexp.explorer.spec.candidate import Recompute
from bexp.explorer.spec.model import DType
from bexp.explorer.spec.training import LoRASpec, Sharding


def render(settings: TrainerSettings) -> ExportDocument:
    """Return the YAML. With `bf16`, Axolotl makes the weights in bfloat16 and computes under autocast."""
    values: dict[str, Any] = {
        "micro_batch_size": settings.micro_batch_size,
        **({} if settings.grad_accum_steps is None else {"gradient_accumulation_steps": settings.grad_accum_steps}),
        "bf16": settings.dtype is DType.BFLOAT16,
        **({"fp16": True} if settings.dtype is DType.FLOAT16 else {}),
        **optimizer_fields(settings, "optimizer"),
        **({"sequence_len": settings.seq_length} if settings.states_length else {}),
        **_text_fields(settings),
        **_adapters(settings.lora),
        "torch_compile": False,
        "gradient_checkpointing": settings.recompute is Recompute.FULL,
        **model_fields(settings),
    }
    if settings.recompute is Recompute.FULL:
        values["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
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
    return yaml_export(settings, values, [*notes, *_precision_notes(settings)])


def _precision_notes(settings: TrainerSettings) -> list[str]:
    """Return what Axolotl does to full weights in half precision that was not measured."""
    if settings.is_own_code or settings.lora is not None or settings.dtype is DType.FLOAT32:
        return []
    if settings.precision != "upcast":
        return [f"precision: Axolotl makes the weights in {settings.dtype} and computes under autocast"]
    if settings.request.training.precision == "upcast":
        return []
    return [
        "memory: Axolotl keeps norms and embeddings in float32 and computes under autocast; its activations were not "
        "measured: explore with --trainer axolotl"
    ]


def _text_fields(settings: TrainerSettings) -> dict[str, Any]:
    """Return what becomes of texts; none if every sequence was measured full.

    Without real batches the packed rows of a micro-batch are one, which kernels for variable lengths need.
    """
    if settings.batching is None:
        return {}
    fields: dict[str, Any] = {"sample_packing": settings.batching == "packed"}
    if settings.batching == "packed":
        flash = (settings.attention or "").startswith("flash_attention")
        return {**fields, "pad_to_sequence_len": True, "multipack_real_batches": not flash}
    return {**fields, "pad_to_sequence_len": False, "group_by_length": settings.batching == "grouped"}


def _adapters(lora: LoRASpec | None) -> dict[str, Any]:
    if lora is None:
        return {}
    fields: dict[str, Any] = {
        "adapter": "lora",
        "lora_r": lora.r,
        "lora_alpha": lora.r if lora.alpha is None else lora.alpha,
    }
    if isinstance(lora.target_modules, str):
        return {**fields, "lora_target_linear": True}
    return {**fields, "lora_target_modules": list(lora.target_modules)}
