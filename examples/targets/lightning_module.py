"""A LightningModule as a target, with its own optimizer: `--target examples/targets/lightning_module.py:Target`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from gpt import GPT
from torch import Tensor


class LanguageModel(lightning.LightningModule):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        names = ("num_layers", "hidden_size", "num_heads", "vocab_size", "seq_length")
        self.gpt = GPT(**{name: config[name] for name in names})

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.gpt(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4, fused=True)


class Target:
    """The module's own training step and optimizer. The Trainer around them is left out."""

    def build(self, config: Mapping[str, Any], device: torch.device) -> LanguageModel:
        self.vocab_size, self.seq_length = config["vocab_size"], config["seq_length"]
        return LanguageModel(config).to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)

    def batch(self, micro_batch_size: int, device: torch.device) -> Tensor:
        return torch.randint(self.vocab_size, (micro_batch_size, self.seq_length + 1), device=device)

    def step(self, model: LanguageModel, batch: Tensor) -> Tensor:
        loss = model.training_step(batch, 0)
        loss.backward()
        return loss

    def optimizer(self, model: LanguageModel) -> torch.optim.Optimizer:
        return model.configure_optimizers()
