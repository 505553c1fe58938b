"""Gathers tokens into rows that are sorted by expert, and sums rows into tokens again.

Each token-expert pair is one row. Sorting the routes tells which rows belong together. Both directions use indices and
no atomics, so results are reproducible.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from bexp.kernels.selective_recompute import announce


@dataclass(frozen=True)
class Rows:
    """The place of each token-expert pair.

    `token_of_row` (R,) and `row_of_pair` (T * K,) are int64. Expert e owns the rows before `ends[e]` (int32, on the
    device) that no earlier expert owns. `counts` are the experts' numbers of rows on the host, empty if not requested.
    """

    token_of_row: Tensor
    row_of_pair: Tensor
    ends: Tensor
    counts: tuple[int, ...] = ()


def sorted_rows(routes_TK: Tensor, num_experts: int, *, count: bool) -> Rows:
    """Make one row per pair, ordered by expert and then by token. `count` waits for the device once."""
    num_pairs, top_k = routes_TK.numel(), routes_TK.shape[1]
    # Fewer key bits are fewer passes of the radix sort; an expert's index always fits.
    keys, order = torch.sort(routes_TK.reshape(-1).to(torch.int16), stable=True)
    experts = torch.arange(num_experts, dtype=torch.int16, device=routes_TK.device)
    ends = torch.searchsorted(keys, experts, right=True, out_int32=True)
    row_of_pair = torch.empty_like(order)
    row_of_pair.scatter_(0, order, torch.arange(num_pairs, device=order.device))
    token_of_row = order if top_k == 1 else order // top_k
    return Rows(token_of_row, row_of_pair, ends, _count(ends) if count else ())


def padded_rows(routes_TK: Tensor, num_experts: int) -> tuple[Rows, int]:
    """The same number of rows for every expert, that of the largest, and that number. Waits for the device once.

    A row without a pair repeats token 0; with a weight of 0 it adds nothing to the result or to a gradient.
    """
    rows = sorted_rows(routes_TK, num_experts, count=True)
    capacity = max(rows.counts)
    experts = routes_TK.reshape(-1)
    first_row = torch.cat((rows.ends.new_zeros(1), rows.ends[:-1]))
    row_of_pair = rows.row_of_pair + experts * capacity - first_row[experts]
    pairs = torch.arange(experts.numel(), device=experts.device)
    token_of_row = torch.zeros(num_experts * capacity, dtype=torch.int64, device=experts.device)
    token_of_row.scatter_(0, row_of_pair, pairs // routes_TK.shape[1])
    ends = torch.arange(1, num_experts + 1, dtype=torch.int32, device=experts.device) * capacity
    return Rows(token_of_row, row_of_pair, ends, (capacity,) * num_experts), capacity


def dispatch(x_TD: Tensor, weights_TK: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Gather tokens (T, D) and routing weights (T, K) into rows: (R, D), recomputable, and (R,)."""
    x_RD, weights_R = _Dispatch.apply(  # type: ignore[no-untyped-call]  # untyped in torch
        x_TD, weights_TK, rows.token_of_row, rows.row_of_pair
    )
    announce(x_RD, lambda x: x.index_select(0, rows.token_of_row), x_TD)
    return x_RD, weights_R


def combine(y_RD: Tensor, rows: Rows, top_k: int) -> Tensor:
    """Sum the rows (R, D) of each token: (T, D)."""
    out: Tensor = _Combine.apply(y_RD, rows.token_of_row, rows.row_of_pair, top_k)  # type: ignore[no-untyped-call]  # in torch
    return out


def _count(ends: Tensor) -> tuple[int, ...]:
    last = ends.tolist()
    return tuple(end - start for start, end in zip([0, *last[:-1]], last, strict=True))


def _sum_rows(y_RD: Tensor, row_of_pair: Tensor, top_k: int) -> Tensor:
    y = y_RD.index_select(0, row_of_pair)
    return y if top_k == 1 else y.view(-1, top_k, y.shape[1]).sum(dim=1)


class _Dispatch(Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weights_TK: Tensor, token_of_row: Tensor, row_of_pair: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(row_of_pair)
        ctx.top_k = weights_TK.shape[1]
        # Out of place: the compiler of torch 2.11 loses the gradient through an in-place write into a new tensor.
        weights_R = weights_TK.new_zeros(token_of_row.shape[0]).index_copy(0, row_of_pair, weights_TK.reshape(-1))
        return x_TD.index_select(0, token_of_row), weights_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x_RD: Tensor, grad_weights_R: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (row_of_pair,) = ctx.saved_tensors
        grad_weights = grad_weights_R.index_select(0, row_of_pair).view(-1, ctx.top_k)
        return _sum_rows(grad_x_RD, row_of_pair, ctx.top_k), grad_weights, None, None


class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, token_of_row: Tensor, row_of_pair: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(token_of_row)
        return _sum_rows(y_RD, row_of_pair, top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None, None]:
        (token_of_row,) = ctx.saved_tensors
        return grad_TD.index_select(0, token_of_row), None, None, None
