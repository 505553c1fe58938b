"""The sum of each token's rows as one Triton kernel."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from bexp.kernels.jit import kernel

_CELLS = 4096
_MAX_COLUMNS = 1024


def sum_rows(rows_RD: Tensor, row_of_pair: Tensor, top_k: int, weights_TK: Tensor | None) -> Tensor:
    """As in `combine.sum_rows`; the operands are contiguous."""
    width = rows_RD.shape[1]
    num_tokens = row_of_pair.numel() // top_k
    out = rows_RD.new_empty(num_tokens, width)
    block_d = min(_MAX_COLUMNS, 1 << (width - 1).bit_length())
    block_t = max(1, _CELLS // block_d)
    _sum_rows[(-(-num_tokens // block_t), -(-width // block_d))](
        rows_RD,
        row_of_pair,
        rows_RD if weights_TK is None else weights_TK,
        out,
        num_tokens * top_k,
        width,
        TOP_K=top_k,
        WEIGHTED=weights_TK is not None,
        BLOCK_T=block_t,
        BLOCK_D=block_d,
        num_warps=8,
    )
    return out


@kernel
def _sum_rows(
    rows: tl.tensor,
    row_of_pair: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    num_pairs: tl.tensor,
    D: tl.tensor,
    TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """out[t] = sum over k of weights[t, k] * rows[row_of_pair[t, k]]; the weights are 1 unless WEIGHTED."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = tokens < num_pairs // TOP_K
    live = inside[:, None] & (columns < D)[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_D), dtype=tl.float32)
    for k in range(TOP_K):
        row = tl.load(row_of_pair + tokens * TOP_K + k, mask=inside, other=0).to(tl.int64)
        part = tl.load(rows + row[:, None] * D + columns[None, :], mask=live, other=0.0).to(tl.float32)
        if WEIGHTED:
            part *= tl.load(weights + tokens * TOP_K + k, mask=inside, other=0.0).to(tl.float32)[:, None]
        total += part
    cells = tokens.to(tl.int64)[:, None] * D + columns[None, :]
    tl.store(out + cells, total.to(out.dtype.element_ty), mask=live)
