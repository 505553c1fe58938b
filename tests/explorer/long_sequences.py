"""A model of long sequences that devices may share."""

from __future__ import annotations

from typing import Any

from bexp.explorer.request.request import ExplorationRequest
from tests.explorer.shapes import shapes

MODEL = shapes(8, 1024, 2048, heads=16, vocab=32000, length=16384, name="long", num_query_groups=4)


SMALL: dict[str, Any] = {
    "micro_batch_size": [1, 2, 4],
    "attention_backends": ["cudnn", "flash"],
    "recompute": ["none", "full"],
    "batch_size": 64,
    "num_devices": 4,
}


def request(sizes: Any = (1, 2, 4), **changes: Any) -> ExplorationRequest:
    shared = {"sizes": sizes, **changes.pop("context_parallel", {})}
    return ExplorationRequest.model_validate({"model": MODEL, **SMALL, "context_parallel": shared, **changes})
