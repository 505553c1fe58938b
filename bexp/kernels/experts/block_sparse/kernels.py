"""Block-sparse matrix products in Triton. Imported only where Triton is installed.

A sparse matrix consists of the values of its blocks, (blocks, BLOCK, BLOCK), and their places: `row_indices` and
`column_indices` of each block, and `offsets` into the blocks by block row (BCSR). For access by block column there are
`blocks_t`, the blocks in the order of their columns, and `offsets_t` into it. The dense factor holds one matrix per
expert, (E, inner axis, columns) in any order of axes. Block column j belongs to expert j // columns_per_expert.
"""

from __future__ import annotations

import triton.language as tl

from bexp.kernels.jit import jit


@jit
def sdd_kernel(
    x: tl.tensor,
    w: tl.tensor,
    values: tl.tensor,
    row_indices: tl.tensor,
    column_indices: tl.tensor,
    columns_per_expert: tl.tensor,
    K: tl.tensor,
    stride_we: tl.tensor,
    stride_wk: tl.tensor,
    stride_wn: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Compute sparse = dense x (rows, K) @ dense w[e] (K, N), with one program per block of the result."""
    block = tl.program_id(0).to(tl.int64)
    column = tl.load(column_indices + block)
    expert = column // columns_per_expert
    row = tl.load(row_indices + block).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    col = (column - expert * columns_per_expert) * BLOCK + tl.arange(0, BLOCK)
    ks = tl.arange(0, BLOCK_K)
    x_at = x + row[:, None] * K + ks[None, :]
    w_at = w + expert.to(tl.int64) * stride_we + ks[:, None].to(tl.int64) * stride_wk + col[None, :] * stride_wn
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        a = tl.load(x_at, mask=ks[None, :] < K - k, other=0.0)
        b = tl.load(w_at, mask=ks[:, None] < K - k, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        x_at += BLOCK_K
        w_at += BLOCK_K * stride_wk
    inside = tl.arange(0, BLOCK)
    at = values + block * BLOCK * BLOCK + inside[:, None] * BLOCK + inside[None, :]
    tl.store(at, acc.to(values.dtype.element_ty))


@jit
def dsd_kernel(
    values: tl.tensor,
    w: tl.tensor,
    out: tl.tensor,
    offsets: tl.tensor,
    column_indices: tl.tensor,
    columns_per_expert: tl.tensor,
    N: tl.tensor,
    stride_we: tl.tensor,
    stride_wk: tl.tensor,
    stride_wn: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Compute dense (rows, N) = sparse @ dense w[e], with one program per block row and BLOCK_N columns."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    block_row = tl.program_id(0) // tiles_n
    col = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.load(offsets + block_row)
    last = tl.load(offsets + block_row + 1)
    inside = tl.arange(0, BLOCK)
    ks = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK, BLOCK_N), tl.float32)
    STEPS: tl.constexpr = BLOCK // BLOCK_K
    for step in tl.range(first * STEPS, last * STEPS):
        block = step // STEPS
        k = (step - block * STEPS) * BLOCK_K + ks
        column = tl.load(column_indices + block)
        expert = column // columns_per_expert
        w_row = (column - expert * columns_per_expert) * BLOCK + k
        a_at = values + block.to(tl.int64) * BLOCK * BLOCK + inside[:, None] * BLOCK + k[None, :]
        w_at = w + expert.to(tl.int64) * stride_we + w_row[:, None].to(tl.int64) * stride_wk
        b = tl.load(w_at + col[None, :].to(tl.int64) * stride_wn, mask=col[None, :] < N, other=0.0)
        acc = tl.dot(tl.load(a_at), b, acc, input_precision=PRECISION)
    row = block_row.to(tl.int64) * BLOCK + inside
    tl.store(out + row[:, None] * N + col[None, :], acc.to(out.dtype.element_ty), mask=col[None, :] < N)


@jit
def transposed_dsd_kernel(
    values: tl.tensor,
    x: tl.tensor,
    out: tl.tensor,
    offsets_t: tl.tensor,
    blocks_t: tl.tensor,
    row_indices: tl.tensor,
    columns_per_expert: tl.tensor,
    N: tl.tensor,
    stride_oe: tl.tensor,
    stride_oh: tl.tensor,
    stride_on: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Dense out[e] = sparse^T @ dense x (rows, N): one program a block column, over the column's blocks.

    Written to out by its strides: with the last two exchanged this is x^T @ sparse (DDS).
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    column = tl.program_id(0) // tiles_n
    expert = column // columns_per_expert
    col = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.load(offsets_t + column)
    last = tl.load(offsets_t + column + 1)
    inside = tl.arange(0, BLOCK)
    ks = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK, BLOCK_N), tl.float32)
    STEPS: tl.constexpr = BLOCK // BLOCK_K
    for step in tl.range(first * STEPS, last * STEPS):
        at = step // STEPS
        block = tl.load(blocks_t + at).to(tl.int64)
        k = (step - at * STEPS) * BLOCK_K + ks
        row = tl.load(row_indices + block).to(tl.int64) * BLOCK + k
        a = tl.load(values + block * BLOCK * BLOCK + k[:, None] * BLOCK + inside[None, :])
        b = tl.load(x + row[:, None] * N + col[None, :], mask=col[None, :] < N, other=0.0)
        acc = tl.dot(a.T, b, acc, input_precision=PRECISION)
    h = (column - expert * columns_per_expert) * BLOCK + inside
    out_at = out + expert.to(tl.int64) * stride_oe + h[:, None].to(tl.int64) * stride_oh
    out_at += col[None, :].to(tl.int64) * stride_on
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=col[None, :] < N)
