"""A request whose devices exchange gradients, and a candidate of it."""

from __future__ import annotations

from typing import Any

from explorer.spec.candidate import Candidate
from explorer.spec.request import ExplorationRequest

MODEL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 1024,
    "ffn_hidden_size": 4096,
    "num_attention_heads": 8,
    "vocab_size": 32000,
    "seq_length": 1024,
}


def request(sharding: str = "none", **changes: Any) -> ExplorationRequest:
    fields = {
        "model": MODEL,
        "batch_size": 64,
        "num_devices": 4,
        "micro_batch_size": [1, 2, 4, 8],
        "training": {"sharding": sharding},
        "recompute": ["none"],
        "bta": {"enable": False},
        "attention_backends": ["flash"],
    }
    return ExplorationRequest.model_validate(fields | changes)


def candidate(micro_batch_size: int = 2) -> Candidate:
    return Candidate(micro_batch_size=micro_batch_size, attention_backend="flash", num_query_groups=8)
