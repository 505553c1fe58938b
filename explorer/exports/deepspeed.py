"""A DeepSpeed configuration, as JSON. Names as of DeepSpeed 0.19.

`train_batch_size` is left out: DeepSpeed derives it from the number of processes, and refuses a figure that differs.
DeepSpeed ignores keys that it does not know, so the header stands under `_bexp`.

By default stages 1 and 2 of ZeRO reduce gradients when backward has ended, and stage 3 while it goes on (the validator
of `overlap_comm` in deepspeed/runtime/zero/config.py). The figures assume the latter, so `overlap_comm` is on. Stages 1
and 2 then have two buckets, which take turns, and stage 3 has one.
"""

from __future__ import annotations

import json
from typing import Any

from bexp.explorer.exports.document import ExportDocument, decided_fields
from bexp.explorer.exports.script import script_notes
from bexp.explorer.exports.trainer_settings import TrainerSettings
from bexp.explorer.model.training import Sharding
from bexp.explorer.trainers.trainer import HALF_NAMES

BUCKET_GRADIENTS = 500_000_000
"""Gradients of a bucket unless `reduce_bucket_size` says otherwise; their memory is allocated at once."""
GIB = 2**30


def render(settings: TrainerSettings) -> ExportDocument:
    """Return the JSON."""
    header = (*settings.header, *script_notes(settings), *_exchange_notes(settings))
    stage: dict[str, Any] = {"stage": settings.sharding.level}
    if settings.sharding is not Sharding.NONE:
        stage["overlap_comm"] = True
    values: dict[str, Any] = {
        "_bexp": header,
        "train_micro_batch_size_per_gpu": settings.micro_batch_size,
        **({} if settings.grad_accum_steps is None else {"gradient_accumulation_steps": settings.grad_accum_steps}),
        "zero_optimization": stage,
        **_precision(settings),
    }
    return ExportDocument(
        json.dumps(decided_fields(settings, values), indent=2, allow_nan=False) + "\n", "application/json", header
    )


def _precision(settings: TrainerSettings) -> dict[str, Any]:
    """Return the section of the number formats: half precision with master weights, or autocast of any weights."""
    if settings.has_autocast:
        return {"torch_autocast": {"enabled": True, "dtype": settings.dtype.value}}
    return {HALF_NAMES[settings.dtype]: {"enabled": True}} if settings.dtype in HALF_NAMES else {}


def _exchange_notes(settings: TrainerSettings) -> list[str]:
    """Return what DeepSpeed exchanges at other times than was measured, and what its buckets need."""
    if settings.num_devices == 1:
        return []
    if settings.sharding is Sharding.NONE:
        return [
            "communication: without ZeRO, DeepSpeed reduces gradients when backward has ended, and nothing hides it; "
            "the measured step reduces them while backward goes on"
        ]
    number = 1 if settings.sharding is Sharding.ZERO3 else 2
    size = number * BUCKET_GRADIENTS * settings.dtype.itemsize / GIB
    lines = [
        f"memory: DeepSpeed's buckets of gradients ({number} x {BUCKET_GRADIENTS:,}) take {size:.1f} GiB besides what "
        "was measured; a smaller reduce_bucket_size takes less"
    ]
    if settings.sharding is not Sharding.ZERO3:
        lines.append(
            "communication: DeepSpeed gathers parameters after the optimizer, where nothing hides it; the measured "
            "step gathers them while forward goes on"
        )
    return lines
