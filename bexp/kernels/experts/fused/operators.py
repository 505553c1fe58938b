"""The fused experts as torch operators, so that torch.compile does not break the graph at them.

Outside a graph they only cost host time, so eager runs use the autograd function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bexp.kernels.activations import Activation
from bexp.kernels.experts.fused.function import plan_for
from bexp.kernels.experts.fused.hopper_support import has_hopper_kernels
from bexp.kernels.experts.fused.tiles import default_tiles
from bexp.kernels.experts.fused.token_permutation import permutation_size
from bexp.kernels.experts.matrices import aligned_matrices
from bexp.kernels.triton_support import aligned, launching_on


@torch.library.custom_op(
    "bexp::fused_experts",
    mutates_args=(),
    schema="(Tensor x, Tensor routes, Tensor weights, Tensor w_in, Tensor w_out, str activation, bool keep)"
    " -> (Tensor, Tensor, Tensor)",
)
def fused_experts(
    x_TD: Tensor,
    routes_TK: Tensor,
    weights_TK: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    activation: Activation,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output (T, D) and what backward needs: empty tensors unless `keep` is set."""
    x_TD, routes_TK, weights_TK = aligned(x_TD), routes_TK.contiguous(), aligned(weights_TK)
    w_in, w_out = aligned_matrices(w_in), aligned_matrices(w_out)
    plan = plan_for(x_TD, routes_TK, weights_TK, w_in, w_out, activation, keep=keep)
    with launching_on(x_TD.device):
        out, pre, permutation = plan.forward(x_TD, routes_TK, weights_TK, w_in, w_out)
    if pre is None:
        return out, x_TD.new_empty(0), routes_TK.new_empty(0, dtype=torch.int32)
    return out, pre, permutation


@fused_experts.register_fake
def _(
    x_TD: Tensor, routes_TK: Tensor, weights_TK: Tensor, w_in: Tensor, w_out: Tensor, activation: str, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    (num_tokens, top_k), num_pairs = routes_TK.shape, routes_TK.numel()
    out = x_TD.new_empty(x_TD.shape)
    if not keep:
        return out, x_TD.new_empty(0), routes_TK.new_empty(0, dtype=torch.int32)
    gated, on_hopper = w_in.shape[2] == 2 * w_out.shape[1], has_hopper_kernels(w_in.device)
    without_cache = default_tiles.__wrapped__  # a compiler's sizes may be symbols, which have no hash
    tiles = without_cache(num_tokens, top_k, w_in.shape[0], gated, w_in.element_size(), on_hopper)
    size = permutation_size(num_pairs, w_in.shape[0], tiles.heights(backward=True))
    return out, x_TD.new_empty(num_pairs, w_in.shape[2]), routes_TK.new_empty(size, dtype=torch.int32)


@torch.library.custom_op(
    "bexp::fused_experts_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor weights, Tensor w_in, Tensor w_out, Tensor pre, Tensor permutation,"
    " str activation) -> (Tensor, Tensor, Tensor, Tensor)",
)
def fused_experts_backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    weights_TK: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    pre: Tensor,
    permutation: Tensor,
    activation: Activation,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, the routing weights, w_in and w_out."""
    grad_TD, x_TD, weights_TK = aligned(grad_TD), aligned(x_TD), aligned(weights_TK)
    w_in, w_out = aligned_matrices(w_in), aligned_matrices(w_out)
    plan = plan_for(x_TD, weights_TK, weights_TK, w_in, w_out, activation, keep=True)
    with launching_on(x_TD.device):
        found = plan.backward(grad_TD, x_TD, weights_TK, w_in, w_out, pre, permutation)
    assert found.x is not None
    assert found.weights is not None
    assert found.w_in is not None
    assert found.w_out is not None
    return found.x, found.weights, found.w_in, found.w_out


@fused_experts_backward.register_fake
def _(
    grad_TD: Tensor,
    x_TD: Tensor,
    weights_TK: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    pre: Tensor,
    permutation: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, weights = (t.new_empty(t.shape) for t in (x_TD, weights_TK))
    return x, weights, torch.empty_like(w_in), torch.empty_like(w_out)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x_TD, _, weights_TK, w_in, w_out, activation, _ = inputs
    _, pre, permutation = output
    ctx.save_for_backward(x_TD, weights_TK, w_in, w_out, pre, permutation)
    ctx.activation = activation
    ctx.mark_non_differentiable(pre, permutation)


def _backward(ctx: Any, grad_TD: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    x, weights, w_in, w_out = fused_experts_backward(grad_TD, *ctx.saved_tensors, ctx.activation)
    return x, None, weights, w_in, w_out, None, None


fused_experts.register_autograd(_backward, setup_context=_setup)
