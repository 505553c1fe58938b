"""Forward and backward of the fused expert FFN."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from bexp.kernels.activations import Activation
from bexp.kernels.experts.fused import gemms
from bexp.kernels.experts.fused.hopper.support import has_hopper_kernels
from bexp.kernels.experts.fused.hopper.tiles import HopperSum
from bexp.kernels.experts.fused.layouts import Layout, Operand
from bexp.kernels.experts.fused.tiles import FusedTiles, TileConfig, default_tiles
from bexp.kernels.experts.fused.token_permutation import (
    TokenPermutation,
    gather_rows,
    gather_tiles,
    permute_tokens,
    sum_pairs,
)
from bexp.kernels.experts.matrices import aligned_matrices, stored
from bexp.kernels.selective_recompute import announce
from bexp.kernels.triton_support import aligned, launched_where_it_lies


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

    For backward it keeps x, the routing weights, a row of 2H (or H) numbers per token-expert pair, and eight bytes per
    pair for the permutation. A weight may be the transpose of a contiguous tensor: it is read in that layout, and its
    gradient has the same layout. `tiles` overrides the choice of tiles.
    """
    hidden_size = w_out.shape[1]
    gated = w_in.shape[2] == 2 * hidden_size
    assert gated or w_in.shape[2] == hidden_size, "w_in is (E, D, H) or (E, D, 2H) for w_out (E, H, D)"
    if routes_TK.numel() == 0:
        return x_TD * 0.0
    chosen = tiles or tiles_for(routes_TK, w_in, w_out)
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (x_TD, weights_TK, w_in, w_out))
    out: Tensor = _FusedFFN.apply(  # type: ignore[no-untyped-call]  # untyped in torch
        x_TD, routes_TK, weights_TK, w_in, w_out, activation, chosen, keep
    )
    return out


def tiles_for(routes_TK: Tensor, w_in: Tensor, w_out: Tensor) -> FusedTiles:
    """The default tiles for these operands."""
    gated = w_in.shape[2] == 2 * w_out.shape[1]
    on_hopper = has_hopper_kernels(w_in.device)
    return default_tiles(routes_TK.numel(), w_in.shape[0], gated, w_in.element_size(), on_hopper)


class Kept(NamedTuple):
    """What backward needs beside the operands: the products before the activation (R, 2H or H), and the permutation."""

    pre: Tensor
    permutation: Tensor


class Gradients(NamedTuple):
    """The gradients of x, the routing weights, w_in and w_out; null if one is not needed."""

    x: Tensor | None
    weights: Tensor | None
    w_in: Tensor | None
    w_out: Tensor | None


@launched_where_it_lies
def run_forward(
    x_TD: Tensor,
    routes_TK: Tensor,
    weights_TK: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    activation: Activation,
    tiles: FusedTiles,
    *,
    keep: bool,
) -> tuple[Tensor, Kept | None]:
    """Return the output (T, D) and, if `keep`, what backward needs. Operands have the layout that `gemms` needs."""
    permutation = permute_tokens(routes_TK, w_in.shape[0], tiles.heights(backward=keep))
    hidden, pre = gemms.gate_up_gemm(
        _operand(x_TD, permutation, *tiles.gate_up_gemm.gathers),
        weights_TK,
        w_in,
        w_out.shape[1],
        activation,
        permutation,
        tiles.gate_up_gemm,
        keep=keep,
    )
    out = sum_pairs(gemms.down_gemm(hidden, w_out, permutation, tiles.down_gemm, transposed=False), permutation.top_k)
    return out, None if pre is None else Kept(pre, permutation.buffer)


@launched_where_it_lies
def run_backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    weights_TK: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    kept: Kept,
    activation: Activation,
    tiles: FusedTiles,
    needs: tuple[bool, bool, bool, bool] = (True, True, True, True),
) -> Gradients:
    """Return the gradients that are needed, in the order of `Gradients`."""
    needs_x, needs_weights, needs_w_in, needs_w_out = needs
    permutation = TokenPermutation.of(
        kept.permutation, weights_TK.numel(), w_in.shape[0], weights_TK.shape[1], tiles.heights(backward=True)
    )
    grad_x = grad_weights = grad_w_in = grad_w_out = None
    grad = _operand(grad_TD, permutation, *tiles.grad_hidden.gathers)
    grad_pre, hidden, partial = gemms.differentiate_hidden(
        grad, weights_TK, kept.pre, w_out, activation, permutation, tiles.grad_hidden
    )
    if needs_weights:
        grad_weights = partial.sum(dim=0).to(weights_TK.dtype).view_as(weights_TK)
    if needs_w_out:
        if tiles.grad_w_out.gathers != tiles.grad_hidden.gathers:
            grad = _operand(grad_TD, permutation, *tiles.grad_w_out.gathers)
        grad_w_out = _grad_weight(Operand(hidden, "rows"), grad, w_out, permutation, tiles.grad_w_out)
    del hidden, partial, grad
    if needs_w_in:
        x = _operand(x_TD, permutation, *tiles.grad_w_in.gathers)
        grad_w_in = _grad_weight(x, Operand(grad_pre, "rows"), w_in, permutation, tiles.grad_w_in)
        del x
    if needs_x:
        grad_x = sum_pairs(
            gemms.down_gemm(grad_pre, w_in, permutation, tiles.grad_input, transposed=True), permutation.top_k
        )
    return Gradients(grad_x, grad_weights, grad_w_in, grad_w_out)


def _grad_weight(
    a: Operand, b: Operand, w: Tensor, permutation: TokenPermutation, tile: TileConfig | HopperSum
) -> Tensor:
    """Return the gradient of w (E, K, N), in the layout of w."""
    if stored(w)[1]:
        return gemms.wgrad(b, a, permutation, tile).mT
    return gemms.wgrad(a, b, permutation, tile)


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
        tiles: FusedTiles,
        keep: bool,
    ) -> Tensor:
        x_TD, weights_TK = aligned(x_TD), aligned(weights_TK)
        w_in, w_out = aligned_matrices(w_in), aligned_matrices(w_out)
        out, kept = run_forward(x_TD, routes_TK, weights_TK, w_in, w_out, activation, tiles, keep=keep)
        if kept is not None:
            permutation = kept.permutation

            def project_again(x: Tensor, weights: Tensor) -> Tensor:
                return _pre(x, weights, w_in, w_out, permutation, activation, tiles)

            announce(kept.pre, project_again, x_TD, weights_TK, product=True)
            ctx.save_for_backward(x_TD, weights_TK, w_in, w_out, *kept)
            ctx.activation, ctx.tiles = activation, tiles
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weights_TK, w_in, w_out, *kept = ctx.saved_tensors
        needs_x, _, needs_weights, needs_w_in, needs_w_out = ctx.needs_input_grad[:5]
        found = run_backward(
            aligned(grad_TD),
            x_TD,
            weights_TK,
            w_in,
            w_out,
            Kept(*kept),
            ctx.activation,
            ctx.tiles,
            (needs_x, needs_weights, needs_w_in, needs_w_out),
        )
        return found.x, None, found.weights, found.w_in, found.w_out, None, None, None


@launched_where_it_lies
def _pre(
    x_TD: Tensor,
    weights_TK: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    buffer: Tensor,
    activation: Activation,
    tiles: FusedTiles,
) -> Tensor:
    """Run the first product again with the same permutation, and return what it keeps for backward."""
    permutation = TokenPermutation.of(
        buffer, weights_TK.numel(), w_in.shape[0], weights_TK.shape[1], tiles.heights(backward=True)
    )
    x = _operand(x_TD, permutation, *tiles.gate_up_gemm.gathers)
    _, pre = gemms.gate_up_gemm(
        x, weights_TK, w_in, w_out.shape[1], activation, permutation, tiles.gate_up_gemm, keep=True
    )
    assert pre is not None, "kept because it was asked for"
    return pre


def _operand(tokens: Tensor, permutation: TokenPermutation, layout: Layout, height: int) -> Operand:
    if layout == "tokens":
        return Operand(tokens, layout)
    if layout == "rows":
        return Operand(gather_rows(tokens, permutation), layout)
    return Operand(gather_tiles(tokens, permutation, height), layout, height)
