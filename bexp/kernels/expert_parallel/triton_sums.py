"""Sums of each token's rows on a GPU: a program adds up one token's rows, in a block of columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bexp.kernels.jit import jit
from bexp.kernels.triton_support import launched_where_it_lies

MOST_COLUMNS = 1024
"""Columns of a program, at most."""


@jit
def sum_kernel(
    y: tl.tensor, rows: tl.tensor, starts: tl.tensor, out: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Write one token's sum of its rows, accumulated in float32."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in range(tl.load(starts + token), tl.load(starts + token + 1)):
        row = tl.load(rows + i)
        total += tl.load(y + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)


@launched_where_it_lies
def sum_rows(y_RD: torch.Tensor, rows_R: torch.Tensor, starts_T1: torch.Tensor) -> torch.Tensor:
    """Return the sum (T, D) of the rows `rows_R[starts_T1[t] : starts_T1[t + 1]]` of `y_RD` for each token t.

    Indices are int64. A sum is accumulated in float32, one row after the other, so that it is reproducible.
    """
    num_tokens, width = starts_T1.numel() - 1, y_RD.shape[1]
    out_TD = y_RD.new_empty((num_tokens, width))
    block = min(MOST_COLUMNS, triton.next_power_of_2(width))
    if num_tokens:
        grid = (num_tokens, triton.cdiv(width, block))
        sum_kernel[grid](y_RD.contiguous(), rows_R.contiguous(), starts_T1, out_TD, width, BLOCK=block)
    return out_TD
