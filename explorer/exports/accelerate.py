"""A configuration of `accelerate launch`, as YAML. Names as of accelerate 1.15.

The file configures the processes. The micro-batch, the accumulation and the model belong to the script, so the header
says what to write there.
"""

from __future__ import annotations

from typing import Any

from bexp.explorer.exports.document import ExportDocument, yaml_export
from bexp.explorer.exports.framework import LIBRARY_ATTENTION, LIBRARY_EXPERTS, Framework
from bexp.explorer.exports.sharding_communication import gathering_notes, reduces_each_batch
from bexp.explorer.exports.trainer_settings import TrainerSettings
from bexp.explorer.exports.transformers import PRECISION
from bexp.explorer.spec.candidate import Recompute
from bexp.explorer.spec.training import Sharding

FRAMEWORK = Framework(title="accelerate", attention=LIBRARY_ATTENTION, experts=LIBRARY_EXPERTS, compiled_layers=True)


def render(settings: TrainerSettings) -> ExportDocument:
    """Return the YAML."""
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _distributed_type(settings),
        "num_processes": settings.num_devices,
        "mixed_precision": PRECISION.get(settings.dtype, "no"),
        "use_cpu": settings.device_kind == "cpu",
    }
    if settings.sharding is not Sharding.NONE:
        values["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": settings.sharding is Sharding.ZERO3,
            "fsdp_activation_checkpointing": settings.recompute is Recompute.FULL,
        }
    if settings.compiled_layers:
        values["dynamo_config"] = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}
    return yaml_export(settings, values, [*script_notes(settings, "Accelerator"), *gathering_notes(settings)])


def script_notes(settings: TrainerSettings, holder: str | None = None) -> list[str]:
    """Return what a script has to set itself; `holder` is the class that takes the accumulation steps, if it is one."""
    lines = []
    if holder is not None:
        lines.append(f"in the script: DataLoader(batch_size={settings.micro_batch_size})")
        lines.append(f"in the script: {holder}({_accumulation(settings)})")
    chosen = {"attn_implementation": settings.attention, "experts_implementation": settings.experts}
    arguments = ", ".join(f'{name}="{value}"' for name, value in chosen.items() if value is not None)
    if arguments:
        lines.append(f"in the script: AutoModelForCausalLM.from_pretrained(..., {arguments})")
    if settings.recompute is Recompute.FULL and (holder is None or settings.sharding is Sharding.NONE):
        lines.append("in the script: recompute every layer, for example model.gradient_checkpointing_enable()")
    return lines


def _accumulation(settings: TrainerSettings) -> str:
    if reduces_each_batch(settings):
        plugin = f"GradientAccumulationPlugin(num_steps={settings.grad_accum_steps}, sync_each_batch=True)"
        return f"gradient_accumulation_plugin={plugin}"
    return f"gradient_accumulation_steps={settings.grad_accum_steps}"


def _distributed_type(settings: TrainerSettings) -> str:
    if settings.num_devices == 1:
        return "NO"
    if settings.sharding is not Sharding.NONE:
        return "FSDP"
    return "MULTI_CPU" if settings.device_kind == "cpu" else "MULTI_GPU"
