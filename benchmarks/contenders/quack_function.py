"""Forward and backward of the expert FFN on quack's GEMMs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from benchmarks.contenders import quack_gemms as gemms
from benchmarks.contenders.quack_combine import sum_rows
from benchmarks.contenders.quack_gemms import Groups
from bexp.kernels.activations import Activation
from bexp.kernels.autograd import applied, differentiable_once
from bexp.kernels.experts.matrices import aligned_matrices, stored
from bexp.kernels.experts.rows import sorted_rows
from bexp.kernels.selective_recompute import announce
from bexp.kernels.triton_support import aligned, launched_where_it_lies


def quack_ffn(
    x_TD: Tensor, routes_TK: Tensor, weights_TK: Tensor, w_in: Tensor, w_out: Tensor, activation: Activation
) -> Tensor:
    """Send the tokens through their gated experts; shapes as in `ExpertFFN`. Never waits for the device.

    For backward it keeps x, the routing weights, a row of 2H numbers and eight bytes for each token-expert pair. `w_in`
    should be the transpose of a contiguous tensor, as transformers lays it out; otherwise forward and backward each
    copy it once, and backward copies its gradient.
    """
    if routes_TK.numel() == 0:
        return x_TD * 0.0
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (x_TD, weights_TK, w_in, w_out))
    out: Tensor = _apply(x_TD, routes_TK, weights_TK, w_in, w_out, activation, keep)
    return out


class _QuackFFN(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        routes_TK: Tensor,
        weights_TK: Tensor,
        w_in: Tensor,
        w_out: Tensor,
        activation: Activation,
        keep: bool,
    ) -> Tensor:
        x_TD, weights_TK, w_out = aligned(x_TD), aligned(weights_TK), aligned_matrices(w_out)
        rows = sorted_rows(routes_TK, w_in.shape[0], count=False)
        groups = Groups(gemms.bounds_of(rows.ends), rows.token_of_row.to(torch.int32))
        row_of_pair = rows.row_of_pair.to(torch.int32)
        out, pre = _run_forward(x_TD, weights_TK, w_in, w_out, activation, groups, row_of_pair, keep=keep)
        if pre is not None:

            def project_again(x: Tensor) -> Tensor:
                return _pre(x, w_in, activation, groups)

            announce(pre, project_again, x_TD, product=True)
            ctx.save_for_backward(x_TD, weights_TK, w_in, w_out, pre, row_of_pair, *groups)
            ctx.activation = activation
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weights_TK, w_in, w_out, pre, row_of_pair, *bounds_and_tokens = ctx.saved_tensors
        groups = Groups(*bounds_and_tokens)
        needs = ctx.needs_input_grad
        gradients = _run_backward(
            aligned(grad_TD), x_TD, weights_TK, w_in, w_out, pre, ctx.activation, groups, row_of_pair, needs
        )
        x, weights, grad_w_in, grad_w_out = gradients
        return x, None, weights, grad_w_in, grad_w_out, None, None


_apply = applied(_QuackFFN)


@launched_where_it_lies
def _run_forward(
    x_TD: Tensor,
    weights_TK: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    activation: Activation,
    groups: Groups,
    row_of_pair: Tensor,
    *,
    keep: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the output (T, D) and, if `keep`, the pre-activations (R, 2H)."""
    hidden, pre = gemms.gate_up_gemm(x_TD, _transposed(w_in), activation, groups, keep=keep)
    out = sum_rows(gemms.rows_gemm(hidden, w_out, groups), row_of_pair, weights_TK.shape[1], weights_TK)
    return out, pre


@launched_where_it_lies
def _run_backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    weights_TK: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    pre: Tensor,
    activation: Activation,
    groups: Groups,
    row_of_pair: Tensor,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, the routing weights, w_in and w_out; None for one that is not needed."""
    needs_x, _, needs_weights, needs_w_in, needs_w_out = needs[:5]
    grad_x = grad_weights = grad_w_in = grad_w_out = None
    weights_R = torch.empty_like(row_of_pair, dtype=torch.float32)
    weights_R.scatter_(0, row_of_pair.long(), weights_TK.reshape(-1).float())
    grad_pre, hidden, grad_weights_R = gemms.differentiate_hidden(grad_TD, w_out, pre, weights_R, activation, groups)
    if needs_weights:
        grad_weights = grad_weights_R.index_select(0, row_of_pair).view_as(weights_TK).to(weights_TK.dtype)
    if needs_w_out:
        grad_w_out = torch.empty_like(w_out)
        gemms.sum_over_rows(grad_TD, hidden, grad_w_out.mT, groups)
    del hidden
    if needs_w_in:
        grad_w_in = torch.empty_like(w_in.mT, memory_format=torch.contiguous_format).mT
        gemms.sum_over_rows(x_TD, grad_pre, grad_w_in, groups, gate_and_up=True)
        if not stored(w_in)[1]:
            grad_w_in = grad_w_in.contiguous()
    if needs_x:
        rows = gemms.rows_gemm(grad_pre, _transposed(w_in).mT, groups, gate_and_up=True)
        grad_x = sum_rows(rows, row_of_pair, weights_TK.shape[1])
    return grad_x, grad_weights, grad_w_in, grad_w_out


@launched_where_it_lies
def _pre(x_TD: Tensor, w_in: Tensor, activation: Activation, groups: Groups) -> Tensor:
    """Run the first product again, and return what forward kept of it."""
    _, pre = gemms.gate_up_gemm(x_TD, _transposed(w_in), activation, groups, keep=True)
    assert pre is not None, "kept because it was asked for"
    return pre


def _transposed(w_in: Tensor) -> Tensor:
    """`w_in` (E, D, 2H) as the transpose of a contiguous tensor: itself if it is one, otherwise a copy."""
    return aligned(w_in.mT).mT
