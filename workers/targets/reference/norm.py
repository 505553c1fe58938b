"""Normalisation over the last axis, and of queries and keys over the heads of all tensor-parallel ranks.

In the latter (`qk_norm: full`) the mean of squares spans all ranks, and so does the sum that its gradient needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

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


Total = Callable[[Tensor], Tensor]
"""Sums a tensor over the ranks."""


def norm_over_ranks(
    q_BSHD: Tensor, k_BSGD: Tensor, q_weight: Tensor, k_weight: Tensor, *, size: int, total: Total
) -> tuple[Tensor, Tensor]:
    """Return this rank's queries and keys, normalised over the heads of all `size` ranks.

    The weights (H * D,) and (G * D,) are those of this rank's heads. RMSNorm as in Zhang and Sennrich (2019,
    arXiv:1910.07467), computed in float32.
    """
    q, k = _SharedNorms.apply(q_BSHD, k_BSGD, q_weight, k_weight, size, total)  # type: ignore[no-untyped-call]  # untyped in torch
    return q, k


def total_alone(own: Tensor) -> Tensor:
    """Return a rank's own tensor without an exchange, for the timing of its attention by itself."""
    return own


class _SharedNorms(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, size: int, total: Total
    ) -> tuple[Tensor, ...]:
        squares_2BS = total(torch.stack([each.float().square().sum((-2, -1)) for each in (q, k)]))
        ctx.widths = [size * each.shape[-2] * each.shape[-1] for each in (q, k)]
        scales = [(squares / width + EPSILON).rsqrt() for squares, width in zip(squares_2BS, ctx.widths, strict=True)]
        ctx.save_for_backward(q, k, q_weight, k_weight, *scales)
        ctx.total = total
        inputs = zip((q, k), (q_weight, k_weight), scales, strict=True)
        return tuple((x.float() * _over_heads(scale) * _by_head(w, x)).to(x.dtype) for x, w, scale in inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, q_weight, k_weight, *scales = ctx.saved_tensors
        inputs, weights = (q, k), (q_weight, k_weight)
        weighted = [grad.float() * _by_head(w, x) for grad, w, x in zip(grads, weights, inputs, strict=True)]
        own_2BS = torch.stack([(g * x.float()).sum((-2, -1)) for g, x in zip(weighted, inputs, strict=True)])
        grad_inputs, grad_weights = [], []
        for x, w, g, grad, scale, dot, width in zip(
            inputs, weights, weighted, grads, scales, ctx.total(own_2BS), ctx.widths, strict=True
        ):
            pull = _over_heads(scale.pow(3) * dot / width)
            grad_inputs.append(g.mul_(_over_heads(scale)).sub_(x.float() * pull).to(x.dtype))
            grad_weights.append((grad.float() * x.float() * _over_heads(scale)).sum((0, 1)).flatten().to(w.dtype))
        return *grad_inputs, *grad_weights, None, None


def _over_heads(scale_BS: Tensor) -> Tensor:
    return scale_BS[:, :, None, None]


def _by_head(weight: Tensor, x_BSHD: Tensor) -> Tensor:
    return weight.float().view(x_BSHD.shape[-2:])
