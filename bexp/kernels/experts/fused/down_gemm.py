"""Projections whose rows are stored where their tokens' pairs lie: the second one, and the gradient of the input."""

from __future__ import annotations

import triton.language as tl

from bexp.kernels.experts.fused.tile_loads import load_weight, rows_of_tile, tile_of
from bexp.kernels.jit import kernel


@kernel
def down_gemm_kernel(
    a: tl.tensor,
    w: tl.tensor,
    out: tl.tensor,
    pair_of_row: tl.tensor,
    tile_expert: tl.tensor,
    tile_row: tl.tensor,
    num_tiles: tl.tensor,
    ends: tl.tensor,
    num_pairs: tl.tensor,
    K: tl.tensor,
    N: tl.tensor,
    TRANSPOSED: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """out[pair] = a[row] w: rows in the experts' order to pairs in the tokens' order.

    a (R, K), out (R, N), w (E, K, N), or (E, N, K) when TRANSPOSED. With TMA `a` is a descriptor too.
    """
    num_m = tl.load(num_tiles)
    num_n = tl.cdiv(N, BLOCK_N)
    for index in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLATTEN):
        m, n = tile_of(index, num_m, num_n, GROUP)
        expert, rows, live = rows_of_tile(m, tile_expert, tile_row, ends, BLOCK_M)
        first = tl.load(tile_row + m)
        ks = tl.arange(0, BLOCK_K)
        columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
        if TMA:
            a_pointers = ks
            w_pointers = ks
        else:
            a_pointers = a + tl.minimum(rows, num_pairs - 1).to(tl.int64)[:, None] * K + ks[None, :]
            if TRANSPOSED:
                w_pointers = w + expert.to(tl.int64) * K * N + columns[:, None] * K + ks[None, :]
            else:
                w_pointers = w + expert.to(tl.int64) * K * N + ks[:, None] * N + columns[None, :]
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            inner = ks < K - k
            if TMA:
                rows_tile = a.load([first, k])
            elif EVEN_K:
                rows_tile = tl.load(a_pointers + k)
            else:
                rows_tile = tl.load(a_pointers + k, mask=inner[None, :], other=0.0)
            if TRANSPOSED:
                stride = 1
                mask = inner[None, :] & (columns < N)[:, None]
            else:
                stride = N
                mask = inner[:, None] & (columns < N)[None, :]
            w_tile = load_weight(
                w,
                w_pointers,
                expert,
                k,
                n * BLOCK_N,
                stride,
                mask,
                TRANSPOSED,
                not (EVEN_K and EVEN_N),
                TMA,
                BLOCK_N,
                BLOCK_K,
            )
            total = tl.dot(rows_tile, w_tile, total, input_precision=PRECISION)
        pairs = tl.load(pair_of_row + rows, mask=live, other=0).to(tl.int64)
        tl.store(
            out + pairs[:, None] * N + columns[None, :],
            total.to(out.dtype.element_ty),
            mask=live[:, None] & (columns < N)[None, :],
        )
