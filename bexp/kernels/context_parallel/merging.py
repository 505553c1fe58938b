"""Merges the outputs of attention to parts of the keys into the output of attention to all keys.

Outputs o1, o2 with log-sum-exps l1, l2 merge into o1 + w (o2 - o1), where w = sigmoid(l2 - l1), and the log-sum-exp
log(exp l1 + exp l2). Neither overflows (running form: Milakov and Gimelshein, 2018, arXiv:1805.02867).
"""

from __future__ import annotations

import torch
from torch import Tensor

from bexp.kernels.triton_support import triton_reason


class RunningAttention:
    """Attention to the blocks that were merged so far, in at least float32. There will be `num_blocks` blocks.

    Each block's output is read once. The first one is not converted until a second one is merged with it, and the last
    merge writes the result in its final dtype, so that no pass is spent on conversions.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_left = num_blocks
        self._out: Tensor | None = None
        self._lse: Tensor | None = None
        self._is_own = False

    def merge(self, out: Tensor, lse: Tensor, first_query: int) -> None:
        """Merge the next block's output (B, H, S', D) and log-sum-exp (B, H, S') for the queries from `first_query` on.

        The first block must hold all queries.
        """
        self._num_left -= 1
        if self._out is None or self._lse is None:
            assert first_query == 0, "the first block is of all queries"
            self._out, self._lse = out, lse.contiguous()
            return
        if self._num_left == 0:
            into = torch.empty_like(self._out, dtype=out.dtype)
        elif self._is_own:
            into = self._out
        else:
            into = torch.empty_like(self._out, dtype=torch.promote_types(out.dtype, torch.float32))
        self._lse = merge_block(self._out, self._lse, out, lse, first_query, into)
        self._out, self._is_own = into, True

    def result(self) -> tuple[Tensor, Tensor]:
        """Return the output (B, H, S, D) in the blocks' dtype, and its log-sum-exp (B, H, S)."""
        assert self._out is not None, "there is a block"
        assert self._lse is not None, "there is a block"
        assert self._num_left == 0, "all blocks are merged"
        return self._out, self._lse


def merge_block(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, first_query: int, into: Tensor) -> Tensor:
    """Merge `other` into the rows of `out` from `first_query` on, and write all rows to `into`, which may be `out`.

    `lse` (B, H, S) is contiguous. Returns the log-sum-exp of all rows.
    """
    if out.dtype is not torch.float64 and triton_reason(out.device) is None:
        from bexp.kernels.context_parallel.merging_kernel import merge_rows  # noqa: PLC0415 - optional

        return merge_rows(out, lse, other, other_lse, first_query, into)
    rows, sums = out[:, :, first_query:], lse[:, :, first_query:]
    weight = (other_lse - sums).sigmoid_().unsqueeze(-1)
    merged = rows.to(weight.dtype).lerp(other.to(weight.dtype), weight)
    if into is not out and first_query:
        into[:, :, :first_query].copy_(out[:, :, :first_query])
    into[:, :, first_query:].copy_(merged)
    return torch.cat((lse[:, :, :first_query], torch.logaddexp(sums, other_lse)), dim=2)
