"""The router's kernels. Each program takes some tokens and holds the scores of all experts in registers."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from bexp.kernels.jit import kernel
from bexp.kernels.triton_support import launched_where_it_lies

_ELEMENTS = 4096  # scores a program holds


@launched_where_it_lies
def route(
    scores_TE: Tensor, forced_TK: Tensor, norm_topk_prob: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return routes, weights, and each token's log-sum-exp and sum of the chosen probabilities, shape (2, T)."""
    num_tokens, num_experts = scores_TE.shape
    top_k = forced_TK.shape[1]
    routes = torch.empty_like(forced_TK)
    weights = torch.empty(num_tokens, top_k, dtype=dtype, device=scores_TE.device)
    normalizers = torch.empty(2, num_tokens, dtype=torch.float32, device=scores_TE.device)
    bins, block = _blocks(num_experts)
    _route[(-(-num_tokens // block),)](
        scores_TE,
        forced_TK,
        routes,
        weights,
        normalizers,
        num_tokens,
        num_experts,
        TOP_K=top_k,
        NORM=norm_topk_prob,
        BINS=bins,
        BLOCK=block,
    )
    return routes, weights, normalizers


@launched_where_it_lies
def route_backward(scores_TE: Tensor, routes_TK: Tensor, normalizers: Tensor, grad_TK: Tensor) -> Tensor:
    """Return the gradient of the scores."""
    num_tokens, num_experts = scores_TE.shape
    grad_scores = torch.empty_like(scores_TE)
    bins, block = _blocks(num_experts)
    _route_backward[(-(-num_tokens // block),)](
        scores_TE,
        routes_TK,
        normalizers,
        grad_TK,
        grad_scores,
        num_tokens,
        num_experts,
        TOP_K=routes_TK.shape[1],
        BINS=bins,
        BLOCK=block,
    )
    return grad_scores


def _blocks(num_experts: int) -> tuple[int, int]:
    bins = max(2, 1 << (num_experts - 1).bit_length())
    return bins, max(1, min(64, _ELEMENTS // bins))


@kernel
def _route(
    scores: tl.tensor,
    forced: tl.tensor,
    routes: tl.tensor,
    weights: tl.tensor,
    normalizers: tl.tensor,
    num_pairs: tl.tensor,
    E: tl.tensor,
    TOP_K: tl.constexpr,
    NORM: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = tokens < num_pairs
    experts = tl.arange(0, BINS)
    cells = tokens.to(tl.int64)[:, None] * E + experts[None, :]
    inside = live[:, None] & (experts < E)[None, :]
    x = tl.load(scores + cells, mask=inside, other=float("-inf")).to(tl.float32)
    x = tl.where(live[:, None], x, 0.0)
    largest = tl.max(x, axis=1)
    exponentials = tl.exp(x - largest[:, None])
    total = tl.sum(exponentials, axis=1)
    probabilities = exponentials / total[:, None]
    raised = tl.where((experts < E)[None, :], x, float("-inf"))
    for k in tl.static_range(TOP_K):
        expert = tl.load(forced + tokens.to(tl.int64) * TOP_K + k, mask=live, other=0).to(tl.int32)
        raised = tl.where(experts[None, :] == expert[:, None], float("inf"), raised)
    share = tl.full((BLOCK,), 1.0, dtype=tl.float32)
    if NORM:
        share = tl.zeros((BLOCK,), dtype=tl.float32)
        left = raised
        for _ in tl.static_range(TOP_K):
            chosen = experts[None, :] == tl.argmax(left, axis=1)[:, None]
            share += tl.sum(tl.where(chosen, probabilities, 0.0), axis=1)
            left = tl.where(chosen, float("-inf"), left)
    for k in tl.static_range(TOP_K):
        expert = tl.argmax(raised, axis=1)
        chosen = experts[None, :] == expert[:, None]
        weight = tl.sum(tl.where(chosen, probabilities, 0.0), axis=1) / share
        raised = tl.where(chosen, float("-inf"), raised)
        place = tokens.to(tl.int64) * TOP_K + k
        tl.store(routes + place, expert.to(tl.int64), mask=live)
        tl.store(weights + place, weight.to(weights.dtype.element_ty), mask=live)
    tl.store(normalizers + tokens, largest + tl.log(total), mask=live)
    if NORM:
        tl.store(normalizers + num_pairs + tokens, share, mask=live)
    else:
        tl.store(normalizers + num_pairs + tokens, tl.zeros((BLOCK,), dtype=tl.float32), mask=live)


@kernel
def _route_backward(
    scores: tl.tensor,
    routes: tl.tensor,
    normalizers: tl.tensor,
    grad_weights: tl.tensor,
    grad_scores: tl.tensor,
    num_pairs: tl.tensor,
    E: tl.tensor,
    TOP_K: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the backward of the softmax: p (g - sum(p g)), where g is the gradient of a token's probabilities p.

    g is zero except for the token's routes.

    A share of 0 means that the weights are the probabilities themselves. Otherwise the weights are the probabilities
    divided by the share, and g = (grad - sum(weights * grad)) / share, where grad is the gradient of the weights.
    """
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = tokens < num_pairs
    experts = tl.arange(0, BINS)
    cells = tokens.to(tl.int64)[:, None] * E + experts[None, :]
    inside = live[:, None] & (experts < E)[None, :]
    x = tl.load(scores + cells, mask=inside, other=float("-inf")).to(tl.float32)
    normalizer = tl.load(normalizers + tokens, mask=live, other=0.0)
    share = tl.load(normalizers + num_pairs + tokens, mask=live, other=0.0)
    probabilities = tl.exp(x - normalizer[:, None])
    grad = tl.zeros((BLOCK, BINS), dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        place = tokens.to(tl.int64) * TOP_K + k
        expert = tl.load(routes + place, mask=live, other=0).to(tl.int32)
        mine = tl.load(grad_weights + place, mask=live, other=0.0).to(tl.float32)
        grad = tl.where(experts[None, :] == expert[:, None], mine[:, None], grad)
    normed = share > 0.0
    chosen_sum = tl.sum(probabilities * grad, axis=1)
    scale = tl.where(normed, 1.0 / tl.where(normed, share, 1.0), 1.0)
    mean = tl.where(normed, chosen_sum * scale, 0.0)
    for k in tl.static_range(TOP_K):
        expert = tl.load(routes + tokens.to(tl.int64) * TOP_K + k, mask=live, other=0).to(tl.int32)
        shifted = (grad - mean[:, None]) * scale[:, None]
        grad = tl.where((experts[None, :] == expert[:, None]) & normed[:, None], shifted, grad)
    centre = tl.sum(probabilities * grad, axis=1)
    out = probabilities * (grad - centre[:, None])
    tl.store(grad_scores + cells, out.to(grad_scores.dtype.element_ty), mask=inside)
