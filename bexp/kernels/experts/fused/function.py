"""Forward and backward of the fused expert FFN."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from bexp.kernels.activations import Activation
from bexp.kernels.autograd import applied, differentiable_once
from bexp.kernels.experts.fused.plan import FusedPlan, fused_plan
from bexp.kernels.experts.fused.tiles import FusedTiles
from bexp.kernels.experts.matrices import aligned_matrices
from bexp.kernels.launcher import is_current
from bexp.kernels.selective_recompute import announce
from bexp.kernels.triton_support import aligned


def fused_ffn(
    x_TD: Tensor,
    routes_TK: Tensor,
    weights_TK: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    activation: Activation,
    tiles: FusedTiles | None = None,
) -> Tensor:
    """Send the tokens through their experts; shapes as in `ExpertFFN`. Never waits for the device.

    For backward it keeps x, the routing weights, a row of 2H (or H) numbers per token-expert pair, and twelve bytes per
    pair for the permutation. A weight may be the transpose of a contiguous tensor: it is read in that layout, and its
    gradient has the same layout. `tiles` overrides the choice of tiles.
    """
    if routes_TK.numel() == 0:
        return x_TD * 0.0
    keep = torch.is_grad_enabled() and (
        x_TD.requires_grad or w_in.requires_grad or w_out.requires_grad or weights_TK.requires_grad
    )
    if not keep:
        return _run(x_TD, routes_TK, weights_TK, w_in, w_out, activation, tiles, keep=False)[1][0]
    out: Tensor = _apply(x_TD, routes_TK, weights_TK, w_in, w_out, activation, tiles)
    return out


def plan_for(
    x_TD: Tensor,
    routes_TK: Tensor,
    weights_TK: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    activation: Activation,
    tiles: FusedTiles | None = None,
    *,
    keep: bool,
) -> FusedPlan:
    """The plan for these operands. Weights are contiguous, or the transpose of a contiguous tensor."""
    return fused_plan(
        (x_TD.shape[0], routes_TK.shape[1]),
        w_in.shape,
        w_out.shape[1],
        activation,
        (w_in.dtype, weights_TK.dtype, routes_TK.dtype, x_TD.dtype),
        not w_in.is_contiguous(),
        not w_out.is_contiguous(),
        keep,
        tiles,
        x_TD.get_device(),
    )


def _run(
    x_TD: Tensor,
    routes_TK: Tensor,
    weights_TK: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    activation: Activation,
    tiles: FusedTiles | None,
    *,
    keep: bool,
) -> tuple[FusedPlan, tuple[Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The plan, what it returned, and the operands (but the routes) as it read them."""
    device = x_TD.get_device()
    if not is_current(device):
        with torch.cuda.device(device):
            return _run(x_TD, routes_TK, weights_TK, w_in, w_out, activation, tiles, keep=keep)
    x_TD, weights_TK = aligned(x_TD), aligned(weights_TK)
    w_in, w_out = aligned_matrices(w_in), aligned_matrices(w_out)
    if not routes_TK.is_contiguous():
        routes_TK = routes_TK.contiguous()
    plan = plan_for(x_TD, routes_TK, weights_TK, w_in, w_out, activation, tiles, keep=keep)
    return plan, plan.forward(x_TD, routes_TK, weights_TK, w_in, w_out), (x_TD, weights_TK, w_in, w_out)


class _FusedFFN(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        routes_TK: Tensor,
        weights_TK: Tensor,
        w_in: Tensor,
        w_out: Tensor,
        activation: Activation,
        tiles: FusedTiles | None,
    ) -> Tensor:
        plan, (out, pre, permutation), operands = _run(
            x_TD, routes_TK, weights_TK, w_in, w_out, activation, tiles, keep=True
        )
        assert pre is not None, "kept for backward"
        x_TD, weights_TK, w_in, w_out = operands

        def project_again(x: Tensor, weights: Tensor) -> Tensor:
            return plan.project_again(x, weights, w_in, permutation)

        announce(pre, project_again, x_TD, weights_TK, product=True)
        ctx.save_for_backward(x_TD, weights_TK, w_in, w_out, pre, permutation)
        ctx.plan = plan
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, _, needs_weights, needs_w_in, needs_w_out, *_ = ctx.needs_input_grad
        found = ctx.plan.backward(
            aligned(grad_TD), *ctx.saved_tensors, (needs_x, needs_weights, needs_w_in, needs_w_out)
        )
        return found.x, None, found.weights, found.w_in, found.w_out, None, None


_apply = applied(_FusedFFN)
