"""Token embedding, with learned positions where the model has them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bexp.explorer.model.model import ModelSpec
from bexp.workers.targets.reference.compilation import compiled
from bexp.workers.targets.reference.weights import Weights


class Embedding(nn.Module):
    """Tokens (B, S) to hidden states (B, S, D).

    `positions` (S) are those of the tokens in the forward pass, default 0, 1, 2 and so on.
    """

    positions: Tensor | None

    def __init__(
        self,
        model: ModelSpec,
        *,
        device: torch.device,
        training: bool,
        generator: torch.Generator | None = None,
        positions: Tensor | None = None,
    ) -> None:
        super().__init__()
        weights = Weights.of(model, device, training, generator)
        self.w_tokens = weights.normal(model.vocab_size, model.hidden_size)
        learned = model.position == "learned"
        self.w_positions = weights.normal(model.position_rows, model.hidden_size) if learned else None
        self.register_buffer("positions", positions if learned else None, persistent=False)
        self._compiled: Callable[[Tensor], Tensor] | None = None
        self.train(training)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Look the tokens up."""
        return (self._compiled or self._embed)(tokens_BS)

    def compile_core(self) -> None:
        """Compile the embedding."""
        self._compiled = compiled(self._embed)

    def _embed(self, tokens_BS: Tensor) -> Tensor:
        x_BSD = F.embedding(tokens_BS, self.w_tokens)
        if self.w_positions is None:
            return x_BSD
        if self.positions is not None:
            return x_BSD + F.embedding(self.positions, self.w_positions)
        return x_BSD + self.w_positions[: tokens_BS.shape[1]]
