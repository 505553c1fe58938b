"""A model of long sequences that devices may share."""

from __future__ import annotations

from typing import Any

from bexp.explorer.request.request import ExplorationRequest

MODEL: dict[str, Any] = {
    "name": "long",
    "num_layers": 8,
    "hidden_size": 1024,
    "ffn_hidden_size": 2048,
    "num_attention_heads": 16,
    "num_query_groups": 4,
    "vocab_size": 32000,
    "seq_length": 16384,
}


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
