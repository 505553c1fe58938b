"""Attention over sequences that are spread over the ranks of a process group."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bexp.kernels.context_parallel.blocks import block_attention
from bexp.kernels.context_parallel.layouts import context_parallel_layout
from bexp.kernels.context_parallel.ring import Ring
from bexp.kernels.context_parallel.ring_attention import RingAttention, ring_attention
from bexp.kernels.shapes import AttentionShape


class ContextParallel:
    """Exact attention over a process group. The layout says which positions of a sequence each rank holds.

    Everything but attention works on a rank's own tokens, in the order of `positions`, which position embeddings need
    as well. Attention passes keys and values around the ring of ranks while it computes with those that arrived before
    (Ring Attention, Liu et al., 2023, arXiv:2310.01889). The loop is the same for all layouts.
    """

    def __init__(self, group: dist.ProcessGroup, layout: str) -> None:
        self.layout = context_parallel_layout(layout)
        self._ring = Ring(group)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._ring.size

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that share sequences."""
        return self._ring.group

    @property
    def rank(self) -> int:
        """The rank of this process within the group."""
        return self._ring.rank

    def positions(self, seq_length: int, device: torch.device | None = None) -> Tensor:
        """Return the global positions of this rank's tokens in increasing order, int64 (S / N).

        Raises ValueError if sequences of this length cannot be spread.
        """
        return self._positions(seq_length, self.rank).to(device)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's part of a tensor: S / N of its S positions along `dim`. Differentiable."""
        return x.index_select(dim, self.positions(x.shape[dim], x.device))

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return all ranks' parts in the order of the sequence, without gradients. All ranks must call it."""
        seq_length = x.shape[dim] * self.size
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, x.detach().contiguous(), group=self._ring.group)
        positions = torch.cat([self._positions(seq_length, rank) for rank in range(self.size)])
        return torch.cat(parts, dim).index_select(dim, positions.argsort().to(x.device))

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean of all ranks' x. Its gradient is that of this rank's x. All ranks must call it."""
        total = x.detach().clone()
        dist.all_reduce(total, group=self.group)
        return x + (total / self.size - x.detach())

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = True,
        scale: float | None = None,
        backend: str = "flash",
        bta_tile: int | None = None,
    ) -> Tensor:
        """Return the softmax attention of this rank's queries to the keys of all ranks. All ranks must call it alike.

        q is (B, H, S / N, D), k and v are (B, G, S / N, D), where G divides H. Any strides with a dense last axis will
        do. The result is (B, H, S / N, D). `scale` is 1 / sqrt(D) by default. `bta_tile`, a divisor of B, is the number
        of sequences that go around the ring at a time (BTA); buffers and accumulators have that size.

        Raises ValueError, with the reason, for shapes, dtypes and back ends that are not supported.
        """
        seq_length, head_size = q.shape[2] * self.size, q.shape[-1]
        block = block_attention(backend)
        reason = (
            _shape_reason(q, k, v)
            or self.layout.refusal(seq_length, self.size)
            or block.unsupported_reason(q.dtype, head_size, q.device)
        )
        if reason is not None:
            raise ValueError(reason)
        tile = q.shape[0] if bta_tile is None else bta_tile
        if tile < 1 or q.shape[0] % tile:
            raise ValueError(f"a BTA tile divides the batch: {tile} does not divide {q.shape[0]}")
        plan = RingAttention(
            ring=self._ring,
            steps=self.layout.steps(self.rank, self.size, q.shape[2], causal=causal),
            block=block,
            scale=1.0 / math.sqrt(head_size) if scale is None else scale,
        )
        padding = -head_size % 8 if q.device.type == "cuda" and backend == "flash" else 0
        if padding:
            q, k, v = (F.pad(x, (0, padding)) for x in (q, k, v))
        out = ring_attention(plan, q, k, v, tile)
        return out[..., :head_size] if padding else out

    def _positions(self, seq_length: int, rank: int) -> Tensor:
        reason = self.layout.refusal(seq_length, self.size)
        if reason is not None:
            raise ValueError(reason)
        return self.layout.positions(seq_length, self.size, rank)


def context_parallel_reason(
    shape: AttentionShape, num_ranks: int, layout: str, backend: str, device: torch.device
) -> str | None:
    """Return why attention cannot be spread over `num_ranks` devices like `device`; None if it can.

    Raises ValueError for an unknown layout or back end.
    """
    return context_parallel_layout(layout).refusal(shape.seq_length, num_ranks) or block_attention(
        backend
    ).unsupported_reason(shape.dtype, shape.head_size, device)


def _shape_reason(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    if q.dim() != 4 or k.shape != v.shape or k.shape != (q.shape[0], k.shape[1], *q.shape[2:]):
        return (
            "context parallelism takes queries (B, H, S, D) and keys and values (B, G, S, D), not "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if q.shape[1] % k.shape[1]:
        return f"{k.shape[1]} key heads do not divide {q.shape[1]} query heads"
    if not q.dtype == k.dtype == v.dtype:
        return "queries, keys and values have one dtype"
    return None
