"""Recommendations as `bexp best ID --json` prints them."""

from __future__ import annotations

from typing import Any


def document(**candidate: Any) -> dict[str, Any]:
    """Of a tiny OLMoE."""
    return {
        "job": {
            "id": "exp-1",
            "request": {
                "model": {
                    "hidden_size": 32,
                    "num_layers": 2,
                    "num_attention_heads": 4,
                    "vocab_size": 97,
                    "seq_length": 12,
                    "dtype": "bfloat16",
                    "moe": {"num_experts": 6, "top_k": 2},
                },
                "batch_size": 16,
                "num_devices": 1,
                "training": {"loss": {"kind": "chunked"}},
            },
        },
        "recommendation": {
            "candidate": {
                "micro_batch_size": 4,
                "bta_tile": 2,
                "recompute": "partial_50",
                "attention_backend": "math",
                "expert_backend": "fused",
                **candidate,
            },
            "tokens_per_second": 1000.0,
            "confidence": 97,
            "measured_peak_bytes": 1 << 30,
        },
        "answer": None,
    }
