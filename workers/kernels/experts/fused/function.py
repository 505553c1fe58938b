"""Forward and backward of the fused expert FFN."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from workers.kernels.activations import Activation
from workers.kernels.discarding import announce
from workers.kernels.experts.fused import gemms
from workers.kernels.experts.fused.gemms import Operand
from workers.kernels.experts.fused.order import Order, Tiles, gather_tiles, order_pairs, sum_pairs
from workers.kernels.experts.fused.tiles import FusedTiles, default_tiles


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

    For backward it keeps x, the routing weights, a row of 2H (or H) numbers a pair, and four bytes times two a pair
    for their order. `tiles` overrides the choice of tiles.
    """
    hidden_size = w_out.shape[1]
    gated = w_in.shape[2] == 2 * hidden_size
    assert gated or w_in.shape[2] == hidden_size, "w_in is (E, D, H) or (E, D, 2H) for w_out (E, H, D)"
    if routes_TK.numel() == 0:
        return x_TD * 0.0
    chosen = tiles or default_tiles(routes_TK.numel(), w_in.shape[0], gated, x_TD.element_size())
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (x_TD, weights_TK, w_in, w_out))
    out: Tensor = _FusedFFN.apply(  # type: ignore[no-untyped-call]
        x_TD, routes_TK, weights_TK, w_in, w_out, activation, chosen, keep
    )
    return out


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
        x_TD, weights_TK, w_in, w_out = (t.contiguous() for t in (x_TD, weights_TK, w_in, w_out))
        order = order_pairs(routes_TK, w_in.shape[0], tiles.heights(backward=keep))
        x = _operand(x_TD, order, tiles.project_in.copy)
        hidden, pre = gemms.project_in(
            x, weights_TK, w_in, w_out.shape[1], activation, order, tiles.project_in, keep=keep
        )
        if pre is not None:
            announce(
                pre,
                lambda x, weights: _pre(x, weights, w_in, w_out, activation, order, tiles),
                x_TD,
                weights_TK,
                product=True,
            )
            ctx.save_for_backward(x_TD, weights_TK, w_in, w_out, pre, *_tensors(order))
            ctx.top_k, ctx.activation, ctx.tiles = order.top_k, activation, tiles
            ctx.heights = {height: found.most for height, found in order.tiles.items()}
        return sum_pairs(gemms.project_back(hidden, w_out, order, tiles.project_out, transposed=False), order.top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weights_TK, w_in, w_out, pre, *ordering = ctx.saved_tensors
        order = _order(ctx.top_k, ctx.heights, ordering)
        tiles: FusedTiles = ctx.tiles
        needs_x, _, needs_weights, needs_w_in, needs_w_out = ctx.needs_input_grad[:5]
        grad_x = grad_weights = grad_w_in = grad_w_out = None
        grad_TD = grad_TD.contiguous()
        grad = _operand(grad_TD, order, tiles.grad_hidden.copy)
        grad_pre, hidden, partial = gemms.differentiate_hidden(
            grad, weights_TK, pre, w_out, ctx.activation, order, tiles.grad_hidden
        )
        if needs_weights:
            grad_weights = partial.sum(dim=0).to(weights_TK.dtype).view_as(weights_TK)
        if needs_w_out:
            if tiles.grad_w_out.copy != tiles.grad_hidden.copy:
                grad = _operand(grad_TD, order, tiles.grad_w_out.copy)
            grad_w_out = gemms.sum_outer_products(Operand(hidden, "rows"), grad, order, tiles.grad_w_out)
        del hidden, partial, grad
        if needs_w_in:
            x = _operand(x_TD, order, tiles.grad_w_in.copy)
            grad_w_in = gemms.sum_outer_products(x, Operand(grad_pre, "rows"), order, tiles.grad_w_in)
            del x
        if needs_x:
            grad_x = sum_pairs(
                gemms.project_back(grad_pre, w_in, order, tiles.grad_input, transposed=True), order.top_k
            )
        return grad_x, None, grad_weights, grad_w_in, grad_w_out, None, None, None


def _pre(
    x_TD: Tensor,
    weights_TK: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    activation: Activation,
    order: Order,
    tiles: FusedTiles,
) -> Tensor:
    """What the first product leaves for backward, by that product run again."""
    x = _operand(x_TD, order, tiles.project_in.copy)
    _, pre = gemms.project_in(x, weights_TK, w_in, w_out.shape[1], activation, order, tiles.project_in, keep=True)
    assert pre is not None, "kept because it was asked for"
    return pre


def _operand(tokens: Tensor, order: Order, height: int) -> Operand:
    if not height:
        return Operand(tokens, "tokens")
    return Operand(gather_tiles(tokens, order, height), "padded", height)


def _tensors(order: Order) -> list[Tensor]:
    return [
        order.pair_of_row,
        order.token_of_row,
        order.ends,
        order.largest_first,
        *(t for tiles in order.tiles.values() for t in (tiles.expert, tiles.row, tiles.first, tiles.count)),
    ]


def _order(top_k: int, heights: dict[int, int], tensors: list[Tensor]) -> Order:
    pair_of_row, token_of_row, ends, largest_first, *rest = tensors
    tiles = {}
    for i, (height, most) in enumerate(heights.items()):
        expert, row, first, count = rest[4 * i : 4 * i + 4]
        tiles[height] = Tiles(expert, row, first, count, most)
    return Order(top_k, pair_of_row, token_of_row, ends, largest_first, tiles)
