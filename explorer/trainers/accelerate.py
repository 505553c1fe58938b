"""A configuration of `accelerate launch`, as YAML. Names as of accelerate 1.15.

The file configures the processes. The micro-batch, the accumulation and the model belong to the script, so the header
names the settings of the script.
"""

from __future__ import annotations

from typing import Any

from bexp.explorer.dimensions.attention import LIBRARY_ATTENTION
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.dimensions.experts import LIBRARY_EXPERTS
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.training import Sharding
from bexp.explorer.trainers.document import (
    HALF_NAMES,
    ExportDocument,
    TrainerSettings,
    gathering_notes,
    script_notes,
    yaml_export,
)
from bexp.explorer.trainers.trainer import LIBRARY_RUNS_IT, OTHER_LIBRARIES, Trainer, expresses


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


ACCELERATE = Trainer(
    name="accelerate",
    title="accelerate",
    formats={"accelerate": render},
    expresses=expresses(
        attention=LIBRARY_ATTENTION,
        experts=LIBRARY_EXPERTS,
        execution={Execution.EAGER, Execution.COMPILE},
        optimizer={OTHER_LIBRARIES},
    ),
    targets=LIBRARY_RUNS_IT,
)
