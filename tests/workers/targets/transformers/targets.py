"""Tiny jobs of the target `transformers`, opened on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from bexp.explorer.model.hardware import HardwareSpec, SoftwareVersions
from bexp.explorer.request.request import ExplorationRequest
from bexp.workers.instruments.device_instruments import Instruments
from bexp.workers.targets.transformers.target import TransformersTarget

CPU = torch.device("cpu")
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 160,
}
QWEN_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 160,
}
HARDWARE = HardwareSpec(
    device_kind="cpu",
    device_name="test",
    memory_bytes=1 << 34,
    memory_limit_bytes=1 << 33,
    matmul_flops_per_second={"float32": 1e11, "bfloat16": 1e11},
    memory_bandwidth_bytes_per_second=1e10,
    launch_seconds=1e-6,
    versions=SoftwareVersions(python="3", torch=torch.__version__),
)


def request_for(config: dict[str, Any] = LLAMA, **fields: Any) -> ExplorationRequest:
    return ExplorationRequest.model_validate({"hf_config": config, "hf_seq_length": 16, "batch_size": 8, **fields})


def open_target(config: dict[str, Any] = LLAMA, **fields: Any) -> TransformersTarget:
    return TransformersTarget(request_for(config, **fields), Instruments(CPU))
