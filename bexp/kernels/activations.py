"""The activation between the two matrices of an FFN, gated or plain, with an optional weight for each row."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from bexp.kernels.selective_recompute import recomputable

Activation = Literal["silu", "gelu", "relu"]


def activate(x: Tensor, activation: Activation, *, gated: bool, row_weights: Tensor | None = None) -> Tensor:
    """Return `act(x)`, or `act(gate) * up` if x is (..., 2H) with the gate in front (Shazeer, 2020, arXiv:2002.05202).

    `row_weights` (rows,) multiplies the rows of a two-dimensional result. If the activation is gated or weighted, only
    x and the row weights are kept for backward, which computes the activation again and writes both halves of the
    gradient in place. The result is recomputable, except that of a plain relu, whose own backward keeps it.
    """
    if not gated and row_weights is None:
        plain = partial(_forward, activation=activation)
        return plain(x) if activation == "relu" else recomputable(plain, x)
    if torch.compiler.is_compiling():
        return _weighted(_product(x, activation, gated), row_weights)
    if row_weights is None:
        return recomputable(lambda x: _activate(x, None, activation, gated), x)
    return recomputable(lambda x, weights: _activate(x, weights, activation, gated), x, row_weights)


def _activate(x: Tensor, row_weights: Tensor | None, activation: Activation, gated: bool) -> Tensor:
    out: Tensor = _Activate.apply(x, row_weights, activation, gated)  # type: ignore[no-untyped-call]  # in torch
    return out


class _Activate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, row_weights: Tensor | None, activation: Activation, gated: bool) -> Tensor:
        ctx.save_for_backward(x, row_weights)
        ctx.activation, ctx.gated = activation, gated
        if not gated:
            return _weighted(_forward(x, activation), row_weights)
        gate, up = x.chunk(2, dim=-1)
        out = _forward(gate, activation).mul_(up)
        return out if row_weights is None else out.mul_(row_weights.unsqueeze(-1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, row_weights = ctx.saved_tensors
        activation: Activation = ctx.activation
        grad_x = torch.empty_like(x)
        gate, up = x.chunk(2, dim=-1) if ctx.gated else (x, None)
        grad_gate, grad_up = grad_x.chunk(2, dim=-1) if ctx.gated else (grad_x, None)
        act = _forward(gate, activation) if ctx.gated or row_weights is not None else None
        grad_weights = None
        if row_weights is not None:
            assert act is not None
            product = act * up if up is not None else act
            grad_weights = product.mul_(grad).sum(dim=-1) if up is not None else (product * grad).sum(dim=-1)
            grad = grad * row_weights.unsqueeze(-1)
        if up is not None and grad_up is not None:
            assert act is not None
            torch.mul(grad, act, out=grad_up)
            grad = torch.mul(grad, up, out=act)
        _backward(grad, gate, activation, grad_gate)
        return grad_x, grad_weights, None, None


def _product(x: Tensor, activation: Activation, gated: bool) -> Tensor:
    if not gated:
        return _forward(x, activation)
    gate, up = x.chunk(2, dim=-1)
    return _forward(gate, activation) * up


def _weighted(x: Tensor, row_weights: Tensor | None) -> Tensor:
    return x if row_weights is None else x * row_weights.unsqueeze(-1)


def _forward(x: Tensor, activation: Activation) -> Tensor:
    if activation == "silu":
        return F.silu(x)
    if activation == "gelu":
        return F.gelu(x)
    return F.relu(x)


def _backward(grad: Tensor, x: Tensor, activation: Activation, out: Tensor) -> None:
    if activation == "silu":
        torch.ops.aten.silu_backward.grad_input(grad, x, grad_input=out)
    elif activation == "gelu":
        torch.ops.aten.gelu_backward.grad_input(grad, x, approximate="none", grad_input=out)
    else:
        torch.ops.aten.threshold_backward.grad_input(grad, x, 0, grad_input=out)
