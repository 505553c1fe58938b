"""Any causal language model of a folder, with its own code: `--target examples/targets/hugging_face.py:Target`.

The request is hugging_face.yaml. It names a folder with a config.json, and with the Python files that its
`auto_map` names, if it has one. They are run, so name a folder that you trust.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM


class Target:
    """Forward, the model's own loss, and backward, as transformers' Trainer runs them without accumulation."""

    def __init__(self) -> None:
        self.dimensions = {"gradient_checkpointing": [False, True]}

    def build(self, config: Mapping[str, Any], device: torch.device) -> Any:
        loaded = AutoConfig.from_pretrained(config["folder"], trust_remote_code=True)
        for name, value in config.get("overrides", {}).items():  # such as {"output_router_logits": true}
            setattr(loaded, name, value)
        dtype = getattr(torch, config.get("dtype", "bfloat16"))
        self.vocab_size, self.seq_length = loaded.get_text_config().vocab_size, config["seq_length"]
        with device:
            model = AutoModelForCausalLM.from_config(loaded, dtype=dtype, trust_remote_code=True)
        model.config.use_cache = False
        if config["gradient_checkpointing"]:
            recompute = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            recompute()  # its name changed in the library
        return model.train()

    def batch(self, micro_batch_size: int, device: torch.device) -> Tensor:
        return torch.randint(self.vocab_size, (micro_batch_size, self.seq_length), device=device)

    def step(self, model: Any, batch: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=batch, labels=batch).loss
        loss.backward()
        return loss
