"""A kernel that merges two attention outputs. It reads and writes every row once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from bexp.kernels.jit import jit
from bexp.kernels.triton_support import launched_where_it_lies

_ELEMENTS = 4096
"""Numbers of each output that a program holds."""


@launched_where_it_lies
def merge_rows(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, first_query: int, into: Tensor) -> Tensor:
    """Do what `merging.merge_block` does, on a CUDA device. All outputs have a dense last axis.

    Several warps of a program read the same rows of the log-sum-exp. The result goes to another buffer, because a late
    warp would otherwise read what another warp has already written.
    """
    merged_lse = lse.clone()
    num_sequences, num_heads, seq_length, head_size = out.shape
    begin = first_query if into is out else 0
    num_rows = num_sequences * num_heads * (seq_length - begin)
    width = triton.next_power_of_2(head_size)
    rows = max(1, _ELEMENTS // width)
    _merge[(triton.cdiv(num_rows, rows),)](
        out,
        lse,
        other,
        other_lse,
        into,
        merged_lse,
        num_rows,
        begin,
        first_query,
        seq_length,
        num_heads,
        *out.stride()[:3],
        *other.stride()[:3],
        *other_lse.stride(),
        *into.stride()[:3],
        HEAD_SIZE=head_size,
        WIDTH=width,
        ROWS=rows,
    )
    return merged_lse


@jit
def _merge(
    out: tl.tensor,
    lse: tl.tensor,
    other: tl.tensor,
    other_lse: tl.tensor,
    into: tl.tensor,
    merged_lse: tl.tensor,
    num_rows: tl.tensor,
    begin: tl.tensor,
    first_query: tl.tensor,
    seq_length: tl.tensor,
    num_heads: tl.tensor,
    out_b: tl.tensor,
    out_h: tl.tensor,
    out_s: tl.tensor,
    other_b: tl.tensor,
    other_h: tl.tensor,
    other_s: tl.tensor,
    other_lse_b: tl.tensor,
    other_lse_h: tl.tensor,
    other_lse_s: tl.tensor,
    into_b: tl.tensor,
    into_h: tl.tensor,
    into_s: tl.tensor,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Return the rows in the order sequence, token, head, which is the layout of the fused kernels' outputs."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    num_tokens = seq_length - begin
    h = row % num_heads
    s = (row // num_heads) % num_tokens + begin
    b = row // (num_heads * num_tokens)
    d = tl.arange(0, WIDTH)
    inside = is_row[:, None] & (d < HEAD_SIZE)[None, :]
    merges = is_row & (s >= first_query)
    later = s - first_query

    at = (b * num_heads + h) * seq_length + s
    mine = tl.load(lse + at, mask=is_row, other=0.0)
    theirs = tl.load(
        other_lse + b * other_lse_b + h * other_lse_h + later * other_lse_s, mask=merges, other=float("-inf")
    )
    highest = tl.maximum(mine, theirs)
    lesser = tl.exp(tl.minimum(mine, theirs) - highest)
    weight = tl.where(theirs > mine, 1.0, lesser) / (1.0 + lesser)
    tl.store(merged_lse + at, highest + tl.log(1.0 + lesser), mask=merges)

    x = tl.load(out + (b * out_b + h * out_h + s * out_s)[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    y = tl.load(
        other + (b * other_b + h * other_h + later * other_s)[:, None] + d[None, :],
        mask=inside & merges[:, None],
        other=0.0,
    ).to(tl.float32)
    merged = x + weight[:, None] * (y - x)
    tl.store(into + (b * into_b + h * into_h + s * into_s)[:, None] + d[None, :], merged, mask=inside)
