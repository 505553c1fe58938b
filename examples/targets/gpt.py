"""A GPT in plain PyTorch as a target: bexp explore examples/targets/gpt.yaml --target examples/targets/gpt.py:Target"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.qkv, self.out = nn.Linear(hidden_size, 3 * hidden_size), nn.Linear(hidden_size, hidden_size)
        self.mlp = nn.Sequential(
            nn.Linear(hidden_size, 4 * hidden_size), nn.GELU(), nn.Linear(4 * hidden_size, hidden_size)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, num_layers: int, hidden_size: int, num_heads: int, vocab_size: int, seq_length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, hidden_size), nn.Embedding(seq_length, hidden_size)
        self.blocks = nn.Sequential(*(Block(hidden_size, num_heads) for _ in range(num_layers)))
        self.norm, self.head = nn.LayerNorm(hidden_size), nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Target:
    """What `bexp` measures: the model as it is trained, in bfloat16 on a GPU and in float32 on the CPU."""

    def build(self, config: Mapping[str, Any], device: torch.device) -> GPT:
        self.vocab_size, self.seq_length = config["vocab_size"], config["seq_length"]
        names = ("num_layers", "hidden_size", "num_heads", "vocab_size", "seq_length")
        with device:
            model = GPT(**{name: config[name] for name in names})
        return model.to(torch.bfloat16 if device.type == "cuda" else torch.float32)

    def batch(self, micro_batch_size: int, device: torch.device) -> Tensor:
        return torch.randint(self.vocab_size, (micro_batch_size, self.seq_length + 1), device=device)

    def step(self, model: GPT, batch: Tensor) -> Tensor:
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        return loss
