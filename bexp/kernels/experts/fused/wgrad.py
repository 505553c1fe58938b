"""A grouped GEMM whose output is one matrix an expert: the gradients of the weights, summed over the expert's rows."""

from __future__ import annotations

import triton.language as tl

from bexp.kernels.experts.fused.tile_loads import load_rows, tile_of
from bexp.kernels.jit import kernel


@kernel
def wgrad_kernel(
    a: tl.tensor,
    b: tl.tensor,
    out: tl.tensor,
    token_of_row: tl.tensor,
    ends: tl.tensor,
    largest_first: tl.tensor,
    first_tile: tl.tensor,
    E: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    LAYOUT_A: tl.constexpr,
    LAYOUT_B: tl.constexpr,
    HEIGHT: tl.constexpr,
    EVEN_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """out[e] (M, N) = sum over e's rows of a[row]^T b[row]; an expert without rows gets zeros.

    The layout of one side is "rows" (R, .). The other is "tokens" (T, .), gathered and masked as they are loaded, or
    "padded": tiles of HEIGHT rows, zero behind an expert's end. So one factor is zero there, and the side with rows may
    be read past the end, into the next expert's, which a descriptor cannot help. Experts come in order of their
    rows, the largest first, so that none of those is begun last.
    """
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    per_expert = num_m * num_n
    for index in tl.range(tl.program_id(0), E * per_expert, tl.num_programs(0), flatten=FLATTEN):
        expert = tl.load(largest_first + index // per_expert)
        end = tl.load(ends + expert)
        start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        padded = tl.load(first_tile + expert) * HEIGHT
        m, n = tile_of(index % per_expert, num_m, num_n, GROUP)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for row in range(0, end - start, BLOCK_K):
            a_tile = load_rows(
                a,
                token_of_row,
                start + row,
                padded + row,
                end,
                m * BLOCK_M,
                M,
                LAYOUT_A,
                TMA,
                EVEN_M,
                BLOCK_K,
                BLOCK_M,
            )
            b_tile = load_rows(
                b,
                token_of_row,
                start + row,
                padded + row,
                end,
                n * BLOCK_N,
                N,
                LAYOUT_B,
                TMA,
                EVEN_N,
                BLOCK_K,
                BLOCK_N,
            )
            total = tl.dot(a_tile.T, b_tile, total, input_precision=PRECISION)
        ms = m * BLOCK_M + tl.arange(0, BLOCK_M)
        ns = n * BLOCK_N + tl.arange(0, BLOCK_N)
        tl.store(
            out + expert.to(tl.int64) * M * N + ms[:, None] * N + ns[None, :],
            total.to(out.dtype.element_ty),
            mask=(ms < M)[:, None] & (ns < N)[None, :],
        )
