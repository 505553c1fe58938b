"""The launches of the fused FFN for one shape, prepared once, and the memory that they share."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from bexp.kernels.activations import Activation
from bexp.kernels.allocation import empty
from bexp.kernels.experts.fused import gemms
from bexp.kernels.experts.fused.hopper_support import has_hopper_kernels
from bexp.kernels.experts.fused.hopper_tiles import HopperRows
from bexp.kernels.experts.fused.layouts import FusedShape, Layout, Operand, Workspace
from bexp.kernels.experts.fused.tiles import FusedTiles, default_tiles
from bexp.kernels.experts.fused.token_permutation import (
    Sort,
    TokenPermutation,
    finish_backward,
    gather_rows,
    gather_tiles,
    permutation_size,
    permute_tokens,
    sum_pairs,
)
from bexp.kernels.experts.hopper_grouped.counter import tile_counter
from bexp.kernels.launcher import KEPT_LAUNCHES, Launch, Launches, Pointer, current_stream

_GATHERED_TOGETHER_BYTES = 32 * 2**20
"""Up to this size the rows of the gradient and of x are gathered at once, and lie in memory together."""


class Gradients(NamedTuple):
    """The gradients of x, the routing weights, w_in and w_out; None if one is not needed."""

    x: Tensor | None
    weights: Tensor | None
    w_in: Tensor | None
    w_out: Tensor | None


class FusedPlan:
    """Forward and backward for one shape. Tensors have the layout that `gemms` needs; the device is the current one."""

    def __init__(self, shape: FusedShape, weights_dtype: torch.dtype, tiles: FusedTiles, *, keep: bool) -> None:
        self._shape = shape
        self._weights_dtype = weights_dtype
        self._keep = keep
        heights = tiles.heights(backward=keep)
        permutation = TokenPermutation.of(shape.num_pairs, shape.num_experts, heights)
        self._permutation_size = permutation_size(shape.num_pairs, shape.num_experts, heights)
        self._forward = _Forward(shape, permutation, tiles, keep=keep)
        self._backward = _Backward(shape, permutation, tiles) if keep else None

    def forward(
        self, x_TD: Tensor, routes_TK: Tensor, weights_TK: Tensor, w_in: Tensor, w_out: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the output (T, D), the activation's input if the plan keeps it, and the permutation's buffer."""
        steps, shape = self._forward, self._shape
        stream = current_stream(shape.device)
        permutation = empty(x_TD, (self._permutation_size,), (1,), torch.int32)
        if steps.sort is not None:
            steps.sort(stream, routes_TK, permutation)
        pre = self._empty_pre(x_TD) if self._keep else None
        work = empty(x_TD, (steps.work.numel,), (1,), shape.dtype)
        out = empty(x_TD, (shape.num_tokens, shape.token_size), (shape.token_size, 1), shape.dtype)
        kept = work if pre is None else pre
        steps.launches(stream, x_TD, routes_TK, weights_TK, w_in, w_out, permutation, kept, work, out)
        return out, pre, permutation

    def project_again(self, x_TD: Tensor, weights_TK: Tensor, w_in: Tensor, permutation: Tensor) -> Tensor:
        """Run the first product again with the same permutation, and return what it keeps for backward."""
        steps, shape = self._forward, self._shape
        pre = self._empty_pre(x_TD)
        work = empty(x_TD, (steps.work.numel,), (1,), shape.dtype)
        steps.first_product(current_stream(shape.device), x_TD, weights_TK, w_in, permutation, pre, work)
        return pre

    def backward(
        self,
        grad_TD: Tensor,
        x_TD: Tensor,
        weights_TK: Tensor,
        w_in: Tensor,
        w_out: Tensor,
        pre: Tensor,
        permutation: Tensor,
        needs: tuple[bool, bool, bool, bool] = (True, True, True, True),
    ) -> Gradients:
        """Return the gradients that are needed, in the order of `Gradients`."""
        steps, shape = self._backward, self._shape
        assert steps is not None, "the plan keeps what backward needs"
        needs_x, needs_weights, needs_w_in, needs_w_out = needs
        start, finish = steps.launches(needs)
        device, dtype = shape.device, shape.dtype
        d, h, w = shape.token_size, shape.hidden_size, shape.pre_size
        stream = current_stream(device)
        work = empty(pre, (steps.work.numel,), (1,), dtype)
        counter = tile_counter(device, stream) if steps.claims_tiles else work
        grad_x = grad_weights = grad_w_in = grad_w_out = None
        hidden = empty(pre, (shape.num_pairs, h), (h, 1), dtype)
        if needs_w_out:
            grad_w_out = empty(
                pre, (shape.num_experts, h, d), (h * d, 1, h) if shape.out_transposed else (h * d, d, 1), dtype
            )
        summed = work if grad_w_out is None else grad_w_out
        start(stream, grad_TD, x_TD, weights_TK, w_out, pre, permutation, work, hidden, summed, counter)
        del hidden
        if needs_w_in:
            grad_w_in = empty(
                pre, (shape.num_experts, d, w), (d * w, 1, d) if shape.in_transposed else (d * w, w, 1), dtype
            )
        if needs_x:
            grad_x = empty(pre, (shape.num_tokens, d), (d, 1), dtype)
        if needs_weights:
            grad_weights = empty(pre, (shape.num_tokens, shape.top_k), (shape.top_k, 1), self._weights_dtype)
        if finish is not None:
            results = [work if result is None else result for result in (grad_w_in, grad_x, grad_weights)]
            finish(stream, x_TD, w_in, permutation, work, *results, counter)
        return Gradients(grad_x, grad_weights, grad_w_in, grad_w_out)

    def _empty_pre(self, like: Tensor) -> Tensor:
        shape = self._shape
        return empty(like, (shape.num_pairs, shape.pre_size), (shape.pre_size, 1), shape.dtype)


class _Forward:
    """The launches of forward. `work` holds what was gathered, the weighted activation, and a row for each pair."""

    def __init__(self, shape: FusedShape, permutation: TokenPermutation, tiles: FusedTiles, *, keep: bool) -> None:
        self.work = Workspace("work", shape.dtype)
        hidden = self.work.take(shape.num_pairs * shape.hidden_size)
        layout, height = tiles.gate_up_gemm.gathers
        gathered = _gathered_numel(shape, permutation, layout, height)
        sums = shape.top_k > 1
        rows = self.work.take(max(gathered, _num_summed(shape) if sums else 0))  # of x, and of the output behind them
        x, gather = _gather("x", rows, shape, permutation, layout, height)
        gate_up = gemms.gate_up_gemm(x, Pointer("pre"), hidden, shape, permutation, tiles.gate_up_gemm, keep=keep)
        product = rows if sums else Pointer("out")
        down = gemms.down_gemm(hidden, "w_out", product, shape, permutation, tiles.down_gemm, backward=False)
        by_expert = isinstance(tiles.down_gemm, HopperRows)
        permute = permute_tokens(shape.num_pairs, shape.num_experts, shape.top_k, permutation)
        self.sort = permute if isinstance(permute, Sort) else None
        self.first_product = Launches(("x", "weights", "w_in", "permutation", "pre", "work"), (*gather, gate_up))
        self.launches = Launches(
            ("x", "routes", "weights", "w_in", "w_out", "permutation", "pre", "work", "out"),
            (
                *((permute,) if isinstance(permute, Launch) else ()),
                *gather,
                gate_up,
                down,
                *((sum_pairs(rows, Pointer("out"), shape, permutation, by_expert=by_expert),) if sums else ()),
            ),
        )


class _Backward:
    """The launches of backward. `work` holds the gradients of `pre` and the weights' summands, and gathered rows."""

    def __init__(self, shape: FusedShape, permutation: TokenPermutation, tiles: FusedTiles) -> None:
        self._shape = shape
        self._launches: dict[tuple[bool, bool, bool, bool], tuple[Launches, Launches | None]] = {}
        self.work = Workspace("work", shape.dtype)
        grad_pre = self.work.take(shape.num_pairs * shape.pre_size)
        self._num_summands = gemms.num_summands(shape.hidden_size, tiles.grad_hidden)
        self._partial = self.work.take(self._num_summands * shape.num_pairs, torch.float32)
        places = (tiles.grad_hidden.gathers, tiles.grad_w_out.gathers, tiles.grad_w_in.gathers)
        room = max(_gathered_numel(shape, permutation, *place) for place in places)
        self._sums_rows = shape.top_k > 1
        self._by_expert = isinstance(tiles.grad_input, HopperRows)
        self._permutation = permutation
        self._rows = rows = self.work.take(max(room, _num_summed(shape) if self._sums_rows else 0))

        grad, self._gather_grad = _gather("grad", rows, shape, permutation, *tiles.grad_hidden.gathers)
        again = grad
        self._gather_again: tuple[Launch, ...] = ()
        if tiles.grad_w_out.gathers != tiles.grad_hidden.gathers:
            again, self._gather_again = _gather("grad", rows, shape, permutation, *tiles.grad_w_out.gathers)
        x, self._gather_x = _gather("x", rows, shape, permutation, *tiles.grad_w_in.gathers)
        self._gather_both: tuple[Launch, ...] = ()
        gathered_bytes = x.num_rows * x.width * shape.dtype.itemsize
        in_rows = x.layout == again.layout == "rows" and grad.layout != "padded"
        if in_rows and gathered_bytes <= _GATHERED_TOGETHER_BYTES:
            x = replace(x, pointer=self.work.take(x.num_rows * x.width))
            self._gather_x = (gather_rows("x", x, permutation),)
            self._gather_both = (gather_rows("grad", again, permutation, "x", x),)

        hidden = Pointer("hidden")
        self._differentiate = gemms.differentiate_hidden(
            grad, Pointer("pre"), grad_pre, hidden, self._partial, shape, permutation, tiles.grad_hidden
        )
        activations = Operand(hidden, shape.num_pairs, shape.hidden_size, "rows")
        products = Operand(grad_pre, shape.num_pairs, shape.pre_size, "rows")
        self._grad_w_out, claims = gemms.wgrad(
            *((again, activations) if shape.out_transposed else (activations, again)),
            Pointer("grad_w_out"),
            shape,
            permutation,
            tiles.grad_w_out,
        )
        self._grad_w_in, also_claims = gemms.wgrad(
            *((products, x) if shape.in_transposed else (x, products)),
            Pointer("grad_w_in"),
            shape,
            permutation,
            tiles.grad_w_in,
        )
        self.claims_tiles = claims or also_claims
        product = rows if self._sums_rows else Pointer("grad_x")
        self._grad_input = gemms.down_gemm(
            grad_pre, "w_in", product, shape, permutation, tiles.grad_input, backward=True
        )

    def launches(self, needs: tuple[bool, bool, bool, bool]) -> tuple[Launches, Launches | None]:
        """The launches up to the gradient of `w_out`, and those that follow, None if there are none."""
        found = self._launches.get(needs)
        if found is None:
            found = self._launches[needs] = self._compose(*needs)
        return found

    def _compose(
        self, needs_x: bool, needs_weights: bool, needs_w_in: bool, needs_w_out: bool
    ) -> tuple[Launches, Launches | None]:
        both = self._gather_both if needs_w_in and needs_w_out else ()
        start = [*(both or self._gather_grad), self._differentiate]
        if needs_w_out:
            start += [*(() if both else self._gather_again), self._grad_w_out]
        finish = []
        if needs_w_in:
            finish += [*(() if both else self._gather_x), self._grad_w_in]
        if needs_x:
            finish.append(self._grad_input)
        sums_rows = needs_x and self._sums_rows
        if sums_rows or needs_weights:
            finish.append(
                finish_backward(
                    self._rows,
                    Pointer("grad_x"),
                    self._partial,
                    Pointer("grad_weights"),
                    self._num_summands,
                    self._shape,
                    self._permutation,
                    by_expert=self._by_expert,
                    sums_rows=sums_rows,
                    sums_partial=needs_weights,
                )
            )
        names = ("grad", "x", "weights", "w_out", "pre", "permutation", "work", "hidden", "grad_w_out", "counter")
        more = ("x", "w_in", "permutation", "work", "grad_w_in", "grad_x", "grad_weights", "counter")
        return Launches(names, start), Launches(more, finish) if finish else None


@lru_cache(KEPT_LAUNCHES)
def fused_plan(
    routes_shape: tuple[int, int],
    w_in_shape: tuple[int, int, int],
    hidden_size: int,
    activation: Activation,
    dtypes: tuple[torch.dtype, ...],
    in_transposed: bool,
    out_transposed: bool,
    keep: bool,
    tiles: FusedTiles | None,
    device: int,
) -> FusedPlan:
    """The plan for these operands. `dtypes` are those of the matrices, the routing weights, the routes, and x."""
    (num_tokens, top_k), (num_experts, token_size, pre_size) = routes_shape, w_in_shape
    gated = pre_size == 2 * hidden_size
    assert gated or pre_size == hidden_size, "w_in is (E, D, H) or (E, D, 2H) for w_out (E, H, D)"
    assert dtypes[0] == dtypes[-1], "x and the matrices have the same dtype"
    shape = FusedShape(
        num_tokens,
        top_k,
        num_experts,
        token_size,
        hidden_size,
        gated,
        activation,
        dtypes[0],
        in_transposed,
        out_transposed,
        device,
    )
    return FusedPlan(shape, dtypes[1], tiles or chosen_tiles(shape), keep=keep)


def chosen_tiles(shape: FusedShape) -> FusedTiles:
    """The default tiles."""
    on_hopper = has_hopper_kernels(shape.place)
    sizes = (shape.num_tokens, shape.top_k, shape.num_experts)
    return default_tiles(*sizes, shape.gated, shape.dtype.itemsize, on_hopper)


def _num_summed(shape: FusedShape) -> int:
    return shape.num_pairs * shape.token_size


def _gathered_numel(shape: FusedShape, permutation: TokenPermutation, layout: Layout, height: int) -> int:
    if layout == "tokens":
        return 0
    num_rows = permutation.tiles[height].most * height if layout == "padded" else shape.num_pairs
    return num_rows * shape.token_size


def _gather(
    tokens: str, place: Pointer, shape: FusedShape, permutation: TokenPermutation, layout: Layout, height: int
) -> tuple[Operand, tuple[Launch, ...]]:
    """The rows of `tokens` as a GEMM reads them, and what gathers them in `place` before, if that is needed."""
    if layout == "tokens":
        return Operand(Pointer(tokens), shape.num_tokens, shape.token_size, layout), ()
    if layout == "rows":
        rows = Operand(place, shape.num_pairs, shape.token_size, layout)
        return rows, (gather_rows(tokens, rows, permutation),)
    padded = Operand(place, permutation.tiles[height].most * height, shape.token_size, layout, height)
    return padded, (gather_tiles(tokens, padded, permutation),)
