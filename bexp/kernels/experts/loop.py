"""One GEMM per expert, on slices of one sorted buffer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from bexp.kernels.activations import Activation
from bexp.kernels.experts.expert_backend import ExpertBackend
from bexp.kernels.experts.grouped_ffn import grouped_ffn
from bexp.kernels.experts.rows import Rows, sorted_rows
from bexp.kernels.shapes import ExpertsShape


class _LoopGemm(Function):
    """Writes every product into its slice, so that no expert allocates a gradient for the weights of all experts."""

    @staticmethod
    def forward(ctx: Any, x_RK: Tensor, w_EKN: Tensor, counts: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x_RK, w_EKN)
        ctx.counts = counts
        out = x_RK.new_empty(x_RK.shape[0], w_EKN.shape[2])
        _multiply(x_RK.split(counts), w_EKN.unbind(), out.split(counts), counts)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_RK, w_EKN = ctx.saved_tensors
        counts: tuple[int, ...] = ctx.counts
        grads = grad_RN.split(counts)
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.empty_like(x_RK)
            _multiply(grads, w_EKN.transpose(1, 2).unbind(), grad_x.split(counts), counts)
        if ctx.needs_input_grad[1]:
            grad_w = torch.empty_like(w_EKN)
            for x, grad, out, count in zip(x_RK.split(counts), grads, grad_w.unbind(), counts, strict=True):
                if count:
                    torch.mm(x.t(), grad, out=out)
                else:
                    out.zero_()
        return grad_x, grad_w, None


def _multiply(
    xs: tuple[Tensor, ...], ws: tuple[Tensor, ...], outs: tuple[Tensor, ...], counts: tuple[int, ...]
) -> None:
    for x, w, out, count in zip(xs, ws, outs, counts, strict=True):
        if count:
            torch.mm(x, w, out=out)


def grouped_gemm(x_RK: Tensor, w_EKN: Tensor, rows: Rows) -> Tensor:
    """As in `GroupedGemm`; the rows must have been counted."""
    out: Tensor = _LoopGemm.apply(x_RK, w_EKN, rows.counts)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


def _forward(
    x_TD: Tensor, routes_TK: Tensor, weights_TK: Tensor, w_in: Tensor, w_out: Tensor, activation: Activation
) -> Tensor:
    rows = sorted_rows(routes_TK, w_in.shape[0], count=True)
    return grouped_ffn(x_TD, weights_TK, w_in, w_out, activation, rows, grouped_gemm)


def _check(shape: ExpertsShape, device: torch.device) -> str | None:
    return None  # plain torch operations, which run everywhere


LOOP = ExpertBackend("loop", True, _check, _forward)
