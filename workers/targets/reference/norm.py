"""Normalisation over the last axis."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from bexp.explorer.model.model import ModelSpec
from bexp.workers.targets.reference.weights import Weights

EPSILON = 1e-6


class RMSNorm(nn.Module):
    """Root mean square normalisation with a scale (Zhang and Sennrich, 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, weights: Weights) -> None:
        super().__init__()
        self.weight = weights.ones(size)

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) to the same shape."""
        return F.rms_norm(x, self.weight.shape, self.weight, EPSILON)


class LayerNorm(nn.Module):
    """Layer normalisation with a scale and an offset (Ba et al., 2016, arXiv:1607.06450)."""

    def __init__(self, size: int, weights: Weights) -> None:
        super().__init__()
        self.weight = weights.ones(size)
        self.bias = weights.zeros(size)

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) to the same shape."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, EPSILON)


def build_norm(model: ModelSpec, weights: Weights) -> RMSNorm | LayerNorm:
    """Return the model's norm over its hidden size."""
    kind = RMSNorm if model.norm == "rmsnorm" else LayerNorm
    return kind(model.hidden_size, weights)
