"""A configuration of `accelerate launch`, as YAML. Names as of accelerate 1.15.

The file configures the processes. The micro-batch, the accumulation and the model belong to the script, so the header
says what to write there.
"""

from __future__ import annotations

from typing import Any

from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.exports.document import ExportDocument, yaml_export
from bexp.explorer.exports.script import script_notes
from bexp.explorer.exports.sharding_communication import gathering_notes
from bexp.explorer.exports.trainer_settings import TrainerSettings
from bexp.explorer.model.training import Sharding
from bexp.explorer.trainers.trainer import HALF_NAMES


def render(settings: TrainerSettings) -> ExportDocument:
    """Return the YAML."""
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _distributed_type(settings),
        "num_processes": settings.num_devices,
        "mixed_precision": HALF_NAMES[settings.dtype] if settings.has_autocast else "no",
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


def _distributed_type(settings: TrainerSettings) -> str:
    if settings.num_devices == 1:
        return "NO"
    if settings.sharding is not Sharding.NONE:
        return "FSDP"
    return "MULTI_CPU" if settings.device_kind == "cpu" else "MULTI_GPU"
