"""torchtitan's own Llama 3 as a target: `--target examples/targets/torchtitan_llama.py:Target`.

`target_config: {flavor: 1B, seq_length: 8192}` names one of torchtitan's configurations. The model was built with
torchtitan 0.3.0 and torch 2.13, which needs triton on a CPU too. A step needs a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.models.llama3 import llama3_configs


class Target:
    """The model as torchtitan builds it on one GPU, in bfloat16; its attention has no backward pass on the CPU."""

    def build(self, config: Mapping[str, Any], device: torch.device) -> nn.Module:
        spec = llama3_configs[config["flavor"]]("flex")
        self.vocab_size, self.seq_length = spec.vocab_size, config["seq_length"]
        with device:
            model = spec.build()
            model.init_states(buffer_device=device)
        for parameter in model.parameters():  # the rotary frequencies are complex: model.to() would make them real
            parameter.data = parameter.data.to(torch.bfloat16)
        return model

    def batch(self, micro_batch_size: int, device: torch.device) -> Tensor:
        return torch.randint(self.vocab_size, (micro_batch_size, self.seq_length + 1), device=device)

    def step(self, model: nn.Module, batch: Tensor) -> Tensor:
        tokens = batch[:, :-1]
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        logits = model(tokens, positions, model.get_attention_masks(positions))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        return loss
