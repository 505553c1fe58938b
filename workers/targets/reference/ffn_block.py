"""The dense FFN block, and its network of two matrices, gated or plain."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bexp.explorer.cost.components import BlockRecompute
from bexp.explorer.model.model import ModelSpec
from bexp.kernels.activations import activate
from bexp.kernels.selective_recompute import recomputable
from bexp.workers.targets.reference.block import ResidualBlock
from bexp.workers.targets.reference.norm import build_norm
from bexp.workers.targets.reference.weights import Weights


class MLP(nn.Module):
    """`act(x W) W'`, or `(act(x W_gate) * x W_up) W'` with gate and up projected together."""

    def __init__(self, model: ModelSpec, hidden_size: int, weights: Weights) -> None:
        super().__init__()
        width = 2 * hidden_size if model.gated_mlp else hidden_size
        self.activation, self.gated = model.activation, model.gated_mlp
        self.w_in = weights.normal(width, model.hidden_size)
        self.b_in = weights.normal(width) if model.mlp_bias else None
        self.w_out = weights.normal(model.hidden_size, hidden_size)
        self.b_out = weights.normal(model.hidden_size) if model.mlp_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., D) to the same shape."""
        pre = recomputable(self._project, x, product=True)
        h = activate(pre, self.activation, gated=self.gated)
        return F.linear(h, self.w_out, self.b_out)

    def _project(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w_in, self.b_in)


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
