"""Experts with a capacity: token-expert pairs over it are dropped before the expert FFN runs (GShard, Lepikhin et al.,
2020, arXiv:2006.16668; Switch Transformer, Fedus et al., 2021, arXiv:2101.03961).

An expert keeps its pairs with the largest routing weights, and the earlier ones of equal weights. This is the policy
`probs` of Megatron-Core, which is its default. Routing weights that are left are not renormalised. Nothing is padded to
the capacity, so the expert FFN has fewer rows than without one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from bexp.kernels.activations import Activation
from bexp.kernels.autograd import applied, differentiable_once
from bexp.kernels.experts.expert_backend import ExpertFFN
from bexp.kernels.selective_recompute import announce


@dataclass(frozen=True)
class KeptPairs:
    """The token-expert pairs that are not dropped, in their order: one row each.

    `pair_of_row` (R,) and `row_of_pair` (T * K,) are int64, `is_kept` (T * K,) is bool. A dropped pair has the row of
    another.
    """

    pair_of_row: Tensor
    row_of_pair: Tensor
    is_kept: Tensor


def within_capacity(routes_TK: Tensor, weights_TK: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Return which pairs (T * K,) are among the `capacity` ones of their expert that have the largest weights."""
    weights = weights_TK.detach().reshape(-1)
    experts = routes_TK.reshape(-1).to(torch.int16)  # fewer key bits are fewer passes of the radix sort
    by_weight = torch.sort(weights, descending=True, stable=True).indices
    keys, order = torch.sort(experts.index_select(0, by_weight), stable=True)
    starts = torch.searchsorted(keys, torch.arange(num_experts, dtype=torch.int16, device=keys.device))
    places = torch.arange(keys.numel(), device=keys.device) - starts.index_select(0, keys.long())
    is_kept = torch.empty_like(keys, dtype=torch.bool)
    return is_kept.scatter_(0, by_weight.index_select(0, order), places < capacity)


def keep_pairs(routes_TK: Tensor, weights_TK: Tensor, num_experts: int, capacity: int) -> KeptPairs:
    """Choose the `capacity` pairs of each expert that have the largest weights. Waits for the device once."""
    is_kept = within_capacity(routes_TK, weights_TK, num_experts, capacity)
    row_of_pair = (is_kept.cumsum(0) - 1).clamp_(min=0)
    return KeptPairs(is_kept.nonzero().squeeze(1), row_of_pair, is_kept)


@dataclass(frozen=True)
class ExpertsWithCapacity:
    """An `ExpertFFN` that drops pairs and gives the others to `run_experts`, as tokens with one expert each.

    `capacity_of` says how many pairs an expert takes at most, for a number of tokens.
    """

    run_experts: ExpertFFN
    capacity_of: Callable[[int], int]

    def __call__(
        self,
        x_TD: Tensor,
        routes_TK: Tensor,
        weights_TK: Tensor,
        w_in: Tensor,
        w_out: Tensor,
        activation: Activation,
    ) -> Tensor:
        """Run it; shapes as in `ExpertFFN`. A token whose pairs are all dropped gets zeros."""
        num_tokens, top_k = routes_TK.shape
        kept = keep_pairs(routes_TK, weights_TK, w_in.shape[0], self.capacity_of(num_tokens))
        token_of_row = kept.pair_of_row if top_k == 1 else kept.pair_of_row // top_k
        x_RD, weights_R = _gather(x_TD, weights_TK, token_of_row, kept.pair_of_row, kept.row_of_pair, kept.is_kept)
        announce(x_RD, lambda x: x.index_select(0, token_of_row), x_TD)
        routes_R = routes_TK.reshape(-1).index_select(0, kept.pair_of_row)
        y_RD = self.run_experts(x_RD, routes_R.unsqueeze(1), weights_R.unsqueeze(1), w_in, w_out, activation)
        out: Tensor = _sum(y_RD, token_of_row, kept.row_of_pair, kept.is_kept, top_k)
        return out


def _sum_rows(y_RD: Tensor, row_of_pair: Tensor, is_kept: Tensor, top_k: int) -> Tensor:
    y = y_RD.index_select(0, row_of_pair).masked_fill_(~is_kept.unsqueeze(1), 0.0)
    return y if top_k == 1 else y.view(-1, top_k, y.shape[1]).sum(dim=1)


class _Gather(Function):
    """Tokens and routing weights of the rows. Gradients are summed by indices, without atomics."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weights_TK: Tensor,
        token_of_row: Tensor,
        pair_of_row: Tensor,
        row_of_pair: Tensor,
        is_kept: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(row_of_pair, is_kept)
        ctx.top_k = weights_TK.shape[1]
        return x_TD.index_select(0, token_of_row), weights_TK.reshape(-1).index_select(0, pair_of_row)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_x_RD: Tensor, grad_weights_R: Tensor) -> tuple[Tensor | None, ...]:
        row_of_pair, is_kept = ctx.saved_tensors
        grad_weights = grad_weights_R.index_select(0, row_of_pair).masked_fill_(~is_kept, 0.0)
        grad_x = _sum_rows(grad_x_RD, row_of_pair, is_kept, ctx.top_k)
        return grad_x, grad_weights.view(-1, ctx.top_k), None, None, None, None


class _Sum(Function):
    """The sums of each token's rows."""

    @staticmethod
    def forward(
        ctx: Any, y_RD: Tensor, token_of_row: Tensor, row_of_pair: Tensor, is_kept: Tensor, top_k: int
    ) -> Tensor:
        ctx.save_for_backward(token_of_row)
        return _sum_rows(y_RD, row_of_pair, is_kept, top_k)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        (token_of_row,) = ctx.saved_tensors
        return grad_TD.index_select(0, token_of_row), None, None, None, None


_gather, _sum = applied(_Gather), applied(_Sum)
