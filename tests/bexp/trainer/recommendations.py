"""Recommendations as `bexp best ID --json` prints them."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn


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


def told_of_a_config(training: dict[str, Any], **candidate: Any) -> dict[str, Any]:
    """Of a tiny OLMoE's config.json, measured in the library's own classes."""
    told = document(**candidate)
    request = told["job"]["request"]
    sizes = {key: value for key, value in request.pop("model").items() if key in ("hidden_size", "vocab_size")}
    request |= {"hf_config": {"model_type": "olmoe", **sizes}, "hf_seq_length": 12, "training": training}
    return told


def with_adapters(model: Any, rank: int = 8) -> Any:
    """The model with LoRA adapters on frozen weights: peft's, or parameters of its names where it is not installed."""
    if find_spec("peft"):
        import peft

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # it reads what transformers has renamed
            return peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules=["q_proj"]))
    model.requires_grad_(False)
    model.peft_config = {"default": SimpleNamespace(r=rank)}
    for name, part in list(model.named_modules()):
        if name.endswith("q_proj"):
            part.lora_A = nn.Parameter(torch.zeros(rank, part.in_features))
    return model
