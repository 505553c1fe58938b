"""A part of an Axolotl configuration, as YAML. Names as of Axolotl 0.21."""

from __future__ import annotations

from typing import Any

from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.exports.document import WHAT_ELSE, ExportDocument, yaml_export
from bexp.explorer.exports.script import expert_notes
from bexp.explorer.exports.sharding_communication import gathering_notes, reduces_each_batch
from bexp.explorer.exports.trainer_settings import TrainerSettings
from bexp.explorer.exports.transformers import model_fields, optimizer_fields
from bexp.explorer.model.model import DType
from bexp.explorer.model.quantization import Quantization
from bexp.explorer.model.training import LoRASpec, Sharding
from bexp.explorer.trainers.trainer import TORCH_CHOICE

KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")
"""Switches of Axolotl's own kernels of adapters, which are not measured."""


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
        **_adapters(settings.lora, settings.quantization),
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
    notes = [f"add base_model, datasets {WHAT_ELSE}", *gathering_notes(settings)]
    return yaml_export(settings, values, [*notes, *_precision_notes(settings), *expert_notes(settings)])


def _precision_notes(settings: TrainerSettings) -> list[str]:
    """Return what Axolotl does to the number formats of weights that was not measured."""
    if settings.quantization is not None:  # it prepares them as peft does
        if not (settings.attention or "").startswith("flash_attention"):
            return []
        return [
            f"memory: for flash attention Axolotl may cast norms, embeddings and output layer to {settings.dtype}; "
            "they were measured in float32, as peft prepares them, so it may need less"
        ]
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
    fields: dict[str, Any] = {
        "sample_packing": settings.batching == "packed",
        "excess_length_strategy": "truncate",  # it drops texts that are longer than a sequence by itself
    }
    if settings.batching == "packed":
        flash = (settings.attention or "").startswith("flash_attention")
        if settings.attention in (None, TORCH_CHOICE):
            fields["sdpa_varlen"] = False  # a mask of blocks was measured, and it has kernels for variable lengths
        return {**fields, "pad_to_sequence_len": True, "multipack_real_batches": not flash}
    return {**fields, "pad_to_sequence_len": False, "group_by_length": settings.batching == "grouped"}


def _adapters(lora: LoRASpec | None, quantization: Quantization | None) -> dict[str, Any]:
    if lora is None:
        return {}
    fields: dict[str, Any] = {
        "adapter": "qlora" if quantization is not None and quantization.bits == 4 else "lora",
        "lora_r": lora.r,
        "lora_alpha": lora.r if lora.alpha is None else lora.alpha,
    }
    fields |= dict.fromkeys(KERNELS, False)  # it uses them by itself
    if quantization is not None:
        fields[f"load_in_{quantization.bits}bit"] = True
    if isinstance(lora.target_modules, str):
        fields["lora_target_linear"] = True
    elif lora.target_modules is not None:
        fields["lora_target_modules"] = list(lora.target_modules)
    if lora.dropout:
        fields["lora_dropout"] = lora.dropout
    if lora.target_parameters is not None:
        fields["lora_target_parameters"] = list(lora.target_parameters)
    if lora.modules_to_save is not None:
        fields["lora_modules_to_save"] = list(lora.modules_to_save)
    return fields | {f"peft_{name}": True for name in ("use_dora", "use_rslora") if getattr(lora, name)}
