"""A recommendation as fields of transformers' `TrainingArguments`."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from bexp.trainer.recommended_setup import RecommendedSetup, Source

_PRECISION = {"bfloat16": "bf16", "float16": "fp16"}
_CHECKPOINTING, _OLD_CHECKPOINTING = "activation_checkpointing", "gradient_checkpointing"


def training_arguments(recommendation: Source | RecommendedSetup, *, world_size: int | None = None) -> dict[str, Any]:
    """Return the fields for `TrainingArguments(**fields, ...)`; `bexp.apply` sets what belongs to the model.

    The micro-batch is that of the candidate that divides the requested batch, see `RecommendedSetup`. The effective
    batch stays as requested, because the accumulation steps follow from the number of devices.
    `world_size` defaults to the environment's WORLD_SIZE. The Trainer recomputes layers only if all of them are
    recomputed. `apply` sets any other policy, tiles, kernels and compiled layers, so `torch_compile` stays off.
    Autocast (`bf16`) is on if it was measured.

    Raises RecommendationError if the micro-batch does not divide the effective batch on so many devices.
    """
    setup = RecommendedSetup.read(recommendation)
    devices = world_size or int(os.environ.get("WORLD_SIZE", "1"))
    fields: dict[str, Any] = {
        "per_device_train_batch_size": setup.micro_batch_size,
        "gradient_accumulation_steps": setup.grad_accum_steps(devices),
        "torch_compile": False,
    }
    if setup.settings.recompute == "full":
        name = _checkpointing_field()
        fields |= {name: True, f"{name}_kwargs": {"use_reentrant": False}}
    if setup.autocast in _PRECISION:
        fields[_PRECISION[setup.autocast]] = True
    return fields


def _checkpointing_field() -> str:
    """The name of the field in the installed version; transformers 6 drops the older one."""
    try:
        from transformers import TrainingArguments  # noqa: PLC0415 - it takes seconds, and few answers need it
    except ImportError:
        return _OLD_CHECKPOINTING
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    return _CHECKPOINTING if _CHECKPOINTING in names else _OLD_CHECKPOINTING
