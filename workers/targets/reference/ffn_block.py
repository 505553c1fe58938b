"""The dense FFN block."""

from __future__ import annotations

import torch
from torch import Tensor

from bexp.explorer.cost.components import BlockRecompute
from bexp.explorer.model.model import ModelSpec
from bexp.kernels.selective_recompute import recomputable
from bexp.workers.targets.reference.block import ResidualBlock
from bexp.workers.targets.reference.mlp import MLP
from bexp.workers.targets.reference.norm import build_norm
from bexp.workers.targets.reference.weights import Weights


class DenseFFN(ResidualBlock):
    """A norm and an MLP."""

    def __init__(
        self,
        model: ModelSpec,
        *,
        recompute: BlockRecompute,
        device: torch.device,
        training: bool,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(recompute=recompute, training=training)
        weights = Weights.of(model, device, training, generator)
        self.norm = build_norm(model, weights)
        self.mlp = MLP(model, model.ffn_hidden_size, weights)
        self.train(training)

    def core(self, x_BSD: Tensor) -> Tensor:
        """Return the branch of a tile."""
        out: Tensor = self.mlp(recomputable(self.norm, x_BSD))
        return out
