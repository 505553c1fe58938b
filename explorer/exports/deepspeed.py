"""A DeepSpeed configuration, as JSON. Names as of DeepSpeed 0.19.

`train_batch_size` is left out: DeepSpeed derives it from the number of processes, and refuses a figure that differs.
DeepSpeed ignores keys that it does not know, so the header stands under `_bexp`.
"""

from __future__ import annotations

import json
from typing import Any

from explorer.exports.accelerate import script_notes
from explorer.exports.document import Export, decided_fields
from explorer.exports.framework import LIBRARY_ATTENTION, LIBRARY_EXPERTS, Framework
from explorer.exports.plan import Plan
from explorer.exports.transformers import PRECISION
from explorer.spec.training import Sharding

FRAMEWORK = Framework(
    title="DeepSpeed", attention=LIBRARY_ATTENTION, experts=LIBRARY_EXPERTS, sharding=frozenset(Sharding)
)


def render(plan: Plan) -> Export:
    """Return the JSON."""
    header = (*plan.header, *script_notes(plan))
    values: dict[str, Any] = {
        "_bexp": header,
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.grad_accum_steps,
        "zero_optimization": {"stage": plan.sharding.level},
    }
    if plan.dtype in PRECISION:
        values[PRECISION[plan.dtype]] = {"enabled": True}
    return Export(
        json.dumps(decided_fields(plan, values), indent=2, allow_nan=False) + "\n", "application/json", header
    )
