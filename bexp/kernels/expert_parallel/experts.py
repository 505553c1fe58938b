"""Expert parallelism: each rank of a process group has a part of the experts, and tokens travel to them and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from bexp.kernels.activations import Activation
from bexp.kernels.expert_parallel.all_to_all import RowAllToAll
from bexp.kernels.expert_parallel.copies import copy_tokens, sum_copies
from bexp.kernels.expert_parallel.peers import GroupPeers, Peers
from bexp.kernels.expert_parallel.placement import Placement, routes_of, rows_of
from bexp.kernels.expert_parallel.shadows import ShadowBroadcast
from bexp.kernels.experts.capacity import within_capacity
from bexp.kernels.experts.expert_backend import ExpertFFN


class ExpertParallel:
    """An expert FFN whose experts are spread over the ranks of a group. It is called as any `ExpertFFN`.

    Rank r of N owns the experts r E / N to (r + 1) E / N - 1; `local_experts` cuts them out of all. `experts` is what
    computes them: the `forward` of any expert back end, such as `expert_backend("grouped_mm").forward`.

        run_experts = ExpertParallel(group, num_experts, expert_backend("grouped_mm").forward, overlap_degree=2)
        out_TD = run_experts(x_TD, routes_TK, weights_TK, w_in, w_out, "silu")

    x (T, D), routes (T, K) and weights (T, K) belong to this rank's tokens, and routes name experts of all ranks: 0 to
    E - 1. w_in (E / N, D, H), or (E / N, D, 2H), and w_out (E / N, H, D) are this rank's experts. The result (T, D) has
    this rank's tokens. Every rank of the group calls it at the same time, forward and backward; T may differ, and may
    be 0. It is differentiable in everything but the routes. A weight's gradient is the sum over the tokens of all
    ranks, as on one device.

    The plain mode has no overlap and no shadowed experts:

    - A token goes once to each rank that has any of its experts, by an all-to-all with uneven splits. The counts are
      exchanged before, and reach the host once. That rank sums what its experts return, weighted, and sends one row
      back; home sums the rows. Backward mirrors the transfers.
    - `overlap_degree` d > 1 cuts the tokens into d chunks. The experts of one chunk compute while other chunks travel
      (Tutel: Hwang et al., MLSys 2023).
    - `shadowed_experts`, in increasing order, are copied to every rank, which computes its own tokens for them. Their
      gradients are reduced to the owners (FasterMoE: He et al., PPoPP 2022). The broadcast runs beside the other
      experts, and the way back of the other rows beside the shadowed experts.

    Sums are accumulated in float32, but a rank's sum is rounded once more than the whole sum of one device, because it
    travels in x's dtype. In bfloat16, with 8 of 64 experts a token, the output's error against float64 is 0.39% over 2
    ranks and 0.37% over 8, instead of 0.35%.

    On CUDA, collectives overlap best in a group of `bexp.kernels.context_parallel.ring.ring_group`, whose kernels have
    a high priority. torch.compile cannot trace it. Memory: a rank holds the rows that it receives, one more for
    each of their experts, its own rows while they travel, and S copies with their gradients.

    If experts have a capacity, `capacity_of` says how many of this rank's pairs of token and expert an expert takes at
    most, for a number of tokens. The others are dropped before anything travels: see `bexp.kernels.experts.capacity`.

    `group` may also be other `Peers`, such as those of a measurement on one device.

    Raises:
        ValueError: the experts cannot be spread like this, or the weights are not those of E / N experts.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | Peers,
        num_experts: int,
        experts: ExpertFFN,
        *,
        overlap_degree: int = 1,
        shadowed_experts: tuple[int, ...] = (),
        capacity_of: Callable[[int], int] | None = None,
    ) -> None:
        self._capacity_of = capacity_of
        self._peers: Peers = GroupPeers(group) if isinstance(group, dist.ProcessGroup) else group
        self._experts = experts
        self._placement = Placement(self._peers, num_experts, overlap_degree, shadowed_experts)

    def __call__(
        self,
        x_TD: Tensor,
        routes_TK: Tensor,
        weights_TK: Tensor,
        w_in: Tensor,
        w_out: Tensor,
        activation: Activation,
    ) -> Tensor:
        """Run the experts; shapes as above."""
        placement = self._placement
        if w_in.shape[0] != placement.num_local or w_out.shape[0] != placement.num_local:
            counts = f"{w_in.shape[0]} and {w_out.shape[0]}"
            raise ValueError(f"a rank has {placement.num_local} of {placement.num_experts} experts, not {counts}")
        is_kept: Tensor | None = None
        if self._capacity_of is not None:
            capacity = self._capacity_of(routes_TK.shape[0])
            is_kept = within_capacity(routes_TK, weights_TK, placement.num_experts, capacity)
        placed, peers = placement.place(routes_TK, is_kept), self._peers
        *x_parts, x_home = copy_tokens(x_TD, placed.copies).split(placed.row_sizes)
        *weights_parts, weights_home = weights_TK.flatten().index_select(0, placed.order).split(placed.pair_sizes)
        *codes_parts, codes_home = placed.codes.split(placed.pair_sizes)
        # A device runs the collectives in the order below, and backward's in the reverse order: see `all_to_all`.
        outgoing_codes = [RowAllToAll(peers, chunk.pairs) for chunk in placed.chunks]
        outgoing = [RowAllToAll(peers, chunk.rows, chunk.pairs) for chunk in placed.chunks]
        arriving, arriving_codes = [], []
        for i in range(len(placed.chunks)):
            arriving.append(outgoing[i].start(x_parts[i], weights_parts[i]))
            arriving_codes.append(outgoing_codes[i].launch((codes_parts[i],)))
        shadows = ShadowBroadcast(peers, placement.num_local, placement.shadowed) if placement.shadowed else None
        copies: tuple[Tensor, ...] = ()
        if shadows is not None:
            (w_in, w_out), copies = shadows.start(w_in, w_out)
        returning = []
        for i, chunk in enumerate(placed.chunks):
            outgoing_codes[i].wait()
            (codes,) = arriving_codes[i]
            x, weights = outgoing[i].finish(arriving.pop(0))  # nothing else refers to them, so the rows can be freed
            pairs = rows_of(codes, x.shape[0]) if codes.shape[0] > x.shape[0] else None
            x = x if pairs is None else copy_tokens(x, pairs)
            y = self._run(x, routes_of(codes), weights, w_in, w_out, activation)
            back = RowAllToAll(peers, chunk.rows.back)
            returning.append((back, back.start(y if pairs is None else sum_copies(y, pairs))))
        at_home = []
        if shadows is not None:
            shadow_in, shadow_out = shadows.finish(copies)
            at_home.append(self._run(x_home, routes_of(codes_home), weights_home, shadow_in, shadow_out, activation))
        ys = [*(back.finish(buffers)[0] for back, buffers in returning), *at_home]
        return sum_copies(ys[0] if len(ys) == 1 else torch.cat(ys), placed.copies)

    def _run(
        self, x_PD: Tensor, routes_P1: Tensor, weights_P: Tensor, w_in: Tensor, w_out: Tensor, activation: Activation
    ) -> Tensor:
        if x_PD.shape[0] == 0:  # not every kernel runs without rows, and backward must still take part
            out: Tensor = _NoRows.apply(x_PD, weights_P, w_in, w_out)  # type: ignore[no-untyped-call]  # untyped in torch
            return out
        return self._experts(x_PD, routes_P1, weights_P.unsqueeze(1), w_in, w_out, activation).contiguous()


def local_experts(weights: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part (E / N, ...) of the matrices of all experts (E, ...), a view."""
    return weights.chunk(group.size())[group.rank()]


class _NoRows(Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, weights_R: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
        ctx.save_for_backward(x_RD, weights_R, w_in, w_out)
        return torch.empty_like(x_RD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(tensor) for tensor in ctx.saved_tensors)
