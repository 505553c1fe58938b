"""The ends of the model: the embedding of tokens, and final norm, projection to the vocabulary and loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bexp.explorer.model.model import ModelSpec
from bexp.explorer.model.training import LossSpec
from bexp.kernels.loss import chunked_cross_entropy, full_cross_entropy
from bexp.workers.targets.reference.block import compiled
from bexp.workers.targets.reference.norm import build_norm
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


Loss = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
"""Maps hidden states, projection, its bias and targets to the mean cross entropy."""


class Head(nn.Module):
    """Hidden states (B, S, D) and targets (B, S) to the mean cross entropy, a float32 scalar.

    `w_tied` is the embedding's weight, for a model that ties the two. Without it the head makes its own.
    `shared_loss` replaces the loss if ranks share the vocabulary.
    """

    def __init__(
        self,
        model: ModelSpec,
        *,
        loss: LossSpec,
        device: torch.device,
        training: bool,
        w_tied: nn.Parameter | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        weights = Weights.of(model, device, training, generator)
        self.loss = loss
        self.norm: nn.Module = build_norm(model, weights)
        self.w_vocab = w_tied if w_tied is not None else weights.normal(model.vocab_size, model.hidden_size)
        self.b_vocab = weights.normal(model.vocab_size) if model.lm_head_bias else None
        self._compiled_norm: Callable[[Tensor], Tensor] | None = None
        self._full_loss = full_cross_entropy
        self.shared_loss: Loss | None = None
        self.train(training)

    def forward(self, x_BSD: Tensor, targets_BS: Tensor) -> Tensor:
        """Return the loss."""
        h_TD, targets_T = (self._compiled_norm or self._normalise)(x_BSD), targets_BS.flatten()
        if self.shared_loss is not None:
            return self.shared_loss(h_TD, self.w_vocab, self.b_vocab, targets_T)
        if self.loss.kind == "full":
            return self._full_loss(h_TD, self.w_vocab, self.b_vocab, targets_T)
        return chunked_cross_entropy(h_TD, self.w_vocab, self.b_vocab, targets_T, self.loss.chunk_tokens)

    def compile_core(self) -> None:
        """Compile norm and full loss. The chunked loss stays eager: its graph would grow with the number of chunks."""
        self._compiled_norm = compiled(self._normalise)
        self._full_loss = compiled(full_cross_entropy)

    def _normalise(self, x_BSD: Tensor) -> Tensor:
        h_BSD: Tensor = self.norm(x_BSD)
        return h_BSD.flatten(0, 1)
