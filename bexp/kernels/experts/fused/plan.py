"""The launches of the fused FFN for one shape, prepared once, and the memory that they share."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from bexp.kernels.activations import Activation
from bexp.kernels.allocation import empty
from bexp.kernels.experts.fused import gemms
from bexp.kernels.experts.fused.hopper.support import has_hopper_kernels
from bexp.kernels.experts.fused.layouts import FusedShape, Layout, Operand, Workspace
from bexp.kernels.experts.fused.tiles import FusedTiles, default_tiles
from bexp.kernels.experts.fused.token_permutation import (
    TokenPermutation,
    finish_backward,
    gather_rows,
    gather_tiles,
    permutation_size,
    permute_tokens,
    sum_pairs,
)
from bexp.kernels.experts.hopper.counter import tile_counter
from bexp.kernels.launcher import KEPT_LAUNCHES, Launch, Pointer, current_stream

_GATHERED_TOGETHER_BYTES = 32 * 2**20
"""Up to this size the rows of the gradient and of x are gathered at once, and lie in memory together."""


class Gradients(NamedTuple):
    """The gradients of x, the routing weights, w_in and w_out; null if one is not needed."""

    x: Tensor | None
    weights: Tensor | None
    w_in: Tensor | None
    w_out: Tensor | None


class FusedPlan:
    """Forward and backward for one shape. Tensors have the layout that `gemms` needs; the device is the current one."""

    def __init__(self, shape: FusedShape, weights_dtype: torch.dtype, tiles: FusedTiles, *, keep: bool) -> None:
        self._shape = shape
        self._weights_dtype = weights_dtype
        self._tiles = tiles
        self._keep = keep
        heights = tiles.heights(backward=keep)
        self._permutation_size = permutation_size(shape.num_pairs, shape.num_experts, heights)
        self._permutation = TokenPermutation.of(shape.num_pairs, shape.num_experts, heights)

    def forward(
        self, x_TD: Tensor, routes_TK: Tensor, weights_TK: Tensor, w_in: Tensor, w_out: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the output (T, D), the activation's input if the plan keeps it, and the permutation's buffer."""
        steps, shape = self._forward, self._shape
        stream = current_stream(shape.device)
        permutation = empty(x_TD, (self._permutation_size,), (1,), torch.int32)
        steps.permute(stream, routes_TK, permutation)
        work = empty(x_TD, (steps.work.numel,), (1,), shape.dtype)
        pre = self._empty_pre(x_TD) if self._keep else None
        if steps.gather is not None:
            steps.gather(stream, x_TD, permutation, work)
        steps.gate_up(stream, x_TD, weights_TK, w_in, permutation, work if pre is None else pre, work)
        out = empty(x_TD, (shape.num_tokens, shape.token_size), (shape.token_size, 1), shape.dtype)
        steps.down(stream, w_out, permutation, work, out)
        if steps.sum_pairs is not None:
            steps.sum_pairs(stream, work, out)
        return out, pre, permutation

    def project_again(self, x_TD: Tensor, weights_TK: Tensor, w_in: Tensor, permutation: Tensor) -> Tensor:
        """Run the first product again with the same permutation, and return what it keeps for backward."""
        steps, stream = self._forward, current_stream(self._shape.device)
        work = empty(x_TD, (steps.work.numel,), (1,), self._shape.dtype)
        pre = self._empty_pre(x_TD)
        if steps.gather is not None:
            steps.gather(stream, x_TD, permutation, work)
        steps.gate_up(stream, x_TD, weights_TK, w_in, permutation, pre, work)
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
        needs_x, needs_weights, needs_w_in, needs_w_out = needs
        stream = current_stream(shape.device)
        work = empty(pre, (steps.work.numel,), (1,), shape.dtype)
        hidden = empty(pre, (shape.num_pairs, shape.hidden_size), (shape.hidden_size, 1), shape.dtype)
        if steps.gather_both is not None:
            steps.gather_both(stream, grad_TD, x_TD, permutation, work)
        elif steps.gather_grad is not None:
            steps.gather_grad(stream, grad_TD, permutation, work)
        steps.differentiate(stream, grad_TD, weights_TK, w_out, permutation, pre, work, hidden)
        grad_x = grad_weights = grad_w_in = grad_w_out = None
        if needs_w_out:
            if steps.gather_grad_again is not None:
                steps.gather_grad_again(stream, grad_TD, permutation, work)
            sizes = (shape.num_experts, shape.hidden_size, shape.token_size)
            grad_w_out = _empty_matrices(w_out, sizes, transposed=shape.out_transposed)
            self._sum(steps.w_out, stream, grad_TD, permutation, work, hidden, grad_w_out)
        del hidden
        if needs_w_in:
            if steps.gather_x is not None:
                steps.gather_x(stream, x_TD, permutation, work)
            sizes = (shape.num_experts, shape.token_size, shape.pre_size)
            grad_w_in = _empty_matrices(w_in, sizes, transposed=shape.in_transposed)
            self._sum(steps.w_in, stream, x_TD, permutation, work, grad_w_in)
        if needs_x:
            grad_x = empty(pre, (shape.num_tokens, shape.token_size), (shape.token_size, 1), shape.dtype)
            steps.grad_input(stream, w_in, permutation, work, grad_x)
        if needs_weights:
            grad_weights = empty(pre, (shape.num_tokens, shape.top_k), (shape.top_k, 1), self._weights_dtype)
        finish = steps.finish.get((needs_x, needs_weights))
        if finish is not None:
            finish(stream, work, work if grad_x is None else grad_x, work if grad_weights is None else grad_weights)
        return Gradients(grad_x, grad_weights, grad_w_in, grad_w_out)

    def _empty_pre(self, like: Tensor) -> Tensor:
        shape = self._shape
        return empty(like, (shape.num_pairs, shape.pre_size), (shape.pre_size, 1), shape.dtype)

    def _sum(self, step: tuple[Launch, bool], stream: int, *tensors: Tensor) -> None:
        launch, claims_tiles = step
        if claims_tiles:
            launch(stream, *tensors, tile_counter(self._shape.device, stream))
        else:
            launch(stream, *tensors)

    @cached_property
    def _forward(self) -> _Forward:
        return _Forward(self._shape, self._permutation, self._tiles, keep=self._keep)

    @cached_property
    def _backward(self) -> _Backward:
        return _Backward(self._shape, self._permutation, self._tiles)


class _Forward:
    """The launches of forward. `work` holds what was gathered, the weighted activation, and a row for each pair."""

    def __init__(self, shape: FusedShape, permutation: TokenPermutation, tiles: FusedTiles, *, keep: bool) -> None:
        self.work = Workspace("work", shape.dtype)
        hidden = self.work.take(shape.num_pairs * shape.hidden_size)
        room = shape.num_pairs * shape.token_size if shape.top_k > 1 else 0
        layout, height = tiles.gate_up_gemm.gathers
        room = max(room, _gathered_numel(shape, permutation, layout, height))
        rows = self.work.take(room)  # of x, and of the output behind them
        self.permute = permute_tokens(shape.num_pairs, shape.num_experts, shape.top_k, permutation)
        x, self.gather = _gather(("x", "permutation", "work"), "x", rows, shape, permutation, layout, height)
        self.gate_up = gemms.gate_up_gemm(
            ("x", "weights", "w_in", "permutation", "pre", "work"),
            x,
            Pointer("pre"),
            hidden,
            shape,
            permutation,
            tiles.gate_up_gemm,
            keep=keep,
        )
        self.down = gemms.down_gemm(
            ("w_out", "permutation", "work", "out"),
            hidden,
            "w_out",
            rows if shape.top_k > 1 else Pointer("out"),
            shape,
            permutation,
            tiles.down_gemm,
            backward=False,
        )
        self.sum_pairs = sum_pairs(("work", "out"), rows, Pointer("out"), shape) if shape.top_k > 1 else None


class _Backward:
    """The launches of backward. `work` holds the gradients of `pre` and the weights' summands, and gathered rows."""

    def __init__(self, shape: FusedShape, permutation: TokenPermutation, tiles: FusedTiles) -> None:
        self.work = Workspace("work", shape.dtype)
        grad_pre = self.work.take(shape.num_pairs * shape.pre_size)
        num_summands = gemms.num_summands(shape.hidden_size, tiles.grad_hidden)
        partial = self.work.take(num_summands * shape.num_pairs, torch.float32)
        places = (tiles.grad_hidden.gathers, tiles.grad_w_out.gathers, tiles.grad_w_in.gathers)
        room = max(_gathered_numel(shape, permutation, *place) for place in places)
        rows = self.work.take(max(room, shape.num_pairs * shape.token_size if shape.top_k > 1 else 0))

        gathered = ("grad", "permutation", "work")
        grad, self.gather_grad = _gather(gathered, "grad", rows, shape, permutation, *tiles.grad_hidden.gathers)
        again, self.gather_grad_again = grad, None
        if tiles.grad_w_out.gathers != tiles.grad_hidden.gathers:
            again, self.gather_grad_again = _gather(
                gathered, "grad", rows, shape, permutation, *tiles.grad_w_out.gathers
            )
        x, self.gather_x = _gather(
            ("x", "permutation", "work"), "x", rows, shape, permutation, *tiles.grad_w_in.gathers
        )
        self.gather_both = None
        gathered_bytes = x.num_rows * x.width * shape.dtype.itemsize
        if x.layout == again.layout == "rows" and gathered_bytes <= _GATHERED_TOGETHER_BYTES:
            x = _at(x, self.work.take(x.num_rows * x.width))
            both = ("grad", "x", "permutation", "work")
            self.gather_both = gather_rows(both, "grad", again, permutation, "x", x)
            self.gather_grad_again = self.gather_x = None

        hidden = Pointer("hidden")
        self.differentiate = gemms.differentiate_hidden(
            ("grad", "weights", "w_out", "permutation", "pre", "work", "hidden"),
            grad,
            Pointer("pre"),
            grad_pre,
            hidden,
            partial,
            shape,
            permutation,
            tiles.grad_hidden,
        )
        activations = Operand(hidden, shape.num_pairs, shape.hidden_size, "rows")
        products = Operand(grad_pre, shape.num_pairs, shape.pre_size, "rows")
        self.w_out = gemms.wgrad(
            ("grad", "permutation", "work", "hidden", "grad_w"),
            *((again, activations) if shape.out_transposed else (activations, again)),
            Pointer("grad_w"),
            shape,
            permutation,
            tiles.grad_w_out,
        )
        self.w_in = gemms.wgrad(
            ("x", "permutation", "work", "grad_w"),
            *((products, x) if shape.in_transposed else (x, products)),
            Pointer("grad_w"),
            shape,
            permutation,
            tiles.grad_w_in,
        )
        self.grad_input = gemms.down_gemm(
            ("w_in", "permutation", "work", "grad_x"),
            grad_pre,
            "w_in",
            rows if shape.top_k > 1 else Pointer("grad_x"),
            shape,
            permutation,
            tiles.grad_input,
            backward=True,
        )
        self.finish: dict[tuple[bool, bool], Launch] = {}
        for needs_x in (True, False):
            for needs_weights in (True, False):
                sums_rows = needs_x and shape.top_k > 1
                if not sums_rows and not needs_weights:
                    continue
                self.finish[needs_x, needs_weights] = finish_backward(
                    ("work", "grad_x", "grad_weights"),
                    rows,
                    Pointer("grad_x"),
                    partial,
                    Pointer("grad_weights"),
                    num_summands,
                    shape,
                    sums_rows=sums_rows,
                    sums_partial=needs_weights,
                )


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
    return default_tiles(shape.num_pairs, shape.num_experts, shape.gated, shape.dtype.itemsize, on_hopper)


def _empty_matrices(like: Tensor, sizes: tuple[int, int, int], *, transposed: bool) -> Tensor:
    """Room for matrices (E, K, N) that lie as `like` does."""
    _, k, n = sizes
    return empty(like, sizes, (k * n, 1, k) if transposed else (k * n, n, 1), like.dtype)


def _gathered_numel(shape: FusedShape, permutation: TokenPermutation, layout: Layout, height: int) -> int:
    if layout == "tokens":
        return 0
    num_rows = permutation.tiles[height].most * height if layout == "padded" else shape.num_pairs
    return num_rows * shape.token_size


def _gather(
    tensors: tuple[str, ...],
    tokens: str,
    place: Pointer,
    shape: FusedShape,
    permutation: TokenPermutation,
    layout: Layout,
    height: int,
) -> tuple[Operand, Launch | None]:
    """The rows of `tokens` as a GEMM reads them, and what gathers them in `place` before, if that is needed."""
    if layout == "tokens":
        return Operand(Pointer(tokens), shape.num_tokens, shape.token_size, layout), None
    if layout == "rows":
        rows = Operand(place, shape.num_pairs, shape.token_size, layout)
        return rows, gather_rows(tensors, tokens, rows, permutation)
    padded = Operand(place, permutation.tiles[height].most * height, shape.token_size, layout, height)
    return padded, gather_tiles(tensors, tokens, padded, permutation)


def _at(operand: Operand, place: Pointer) -> Operand:
    return Operand(place, operand.num_rows, operand.width, operand.layout, operand.height)
