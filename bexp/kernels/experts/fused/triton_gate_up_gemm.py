"""The first projection: tokens times their expert's gate and up matrices, with the activation as its epilogue."""

from __future__ import annotations

import triton.language as tl

from bexp.kernels.experts.fused.elementwise import activation
from bexp.kernels.experts.fused.tile_loads import load_weight, rows_of_tile, tile_of
from bexp.kernels.jit import kernel


@kernel
def gate_up_gemm_kernel(  # noqa: PLR0915 - a GPU kernel
    x: tl.tensor,
    w: tl.tensor,
    pre: tl.tensor,
    hidden: tl.tensor,
    weights: tl.tensor,
    pair_of_row: tl.tensor,
    tile_expert: tl.tensor,
    tile_row: tl.tensor,
    num_tiles: tl.tensor,
    ends: tl.tensor,
    D: tl.tensor,
    H: tl.tensor,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    KEEP: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PADDED: tl.constexpr,
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
    """hidden[r] = weight[r] act(x[token] w_gate) * (x[token] w_up), the tokens gathered as the tiles are loaded.

    With KEEP both products are written to `pre` (R, 2H) as well, for backward. x (T, D), w (E, D, 2H or H), or
    (E, 2H or H, D) when TRANSPOSED. When PADDED the tokens were gathered before: x is a descriptor over tiles
    of BLOCK_M rows.
    """
    W = 2 * H if GATED else H
    num_m = tl.load(num_tiles)
    num_n = tl.cdiv(H, BLOCK_N)
    for index in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLATTEN):
        m, n = tile_of(index, num_m, num_n, GROUP)
        expert, rows, live = rows_of_tile(m, tile_expert, tile_row, ends, BLOCK_M)
        pairs = tl.load(pair_of_row + rows, mask=live, other=0)
        ks = tl.arange(0, BLOCK_K)
        columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
        x_pointers = ks
        if not PADDED:
            x_pointers = x + (pairs // TOP_K).to(tl.int64)[:, None] * D + ks[None, :]
        w_pointers = ks
        up_pointers = ks
        if TRANSPOSED:
            stride = 1
            if not TMA:
                w_pointers = w + expert.to(tl.int64) * D * W + columns[:, None] * D + ks[None, :]
                up_pointers = w_pointers + H * D
        else:
            stride = W
            if not TMA:
                w_pointers = w + expert.to(tl.int64) * D * W + ks[:, None] * W + columns[None, :]
                up_pointers = w_pointers + H
        gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, D, BLOCK_K):
            if PADDED:
                a = x.load([m * BLOCK_M, k])
            elif EVEN_K:
                a = tl.load(x_pointers + k)
            else:
                a = tl.load(x_pointers + k, mask=(ks < D - k)[None, :], other=0.0)
            if TRANSPOSED:
                mask = (ks < D - k)[None, :] & (columns < H)[:, None]
            else:
                mask = (ks < D - k)[:, None] & (columns < H)[None, :]
            b = load_weight(
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
            gate = tl.dot(a, b, gate, input_precision=PRECISION)
            if GATED:
                b = load_weight(
                    w,
                    up_pointers,
                    expert,
                    k,
                    H + n * BLOCK_N,
                    stride,
                    mask,
                    TRANSPOSED,
                    not (EVEN_K and EVEN_N),
                    TMA,
                    BLOCK_N,
                    BLOCK_K,
                )
                up = tl.dot(a, b, up, input_precision=PRECISION)
        written = live[:, None] & (columns < H)[None, :]
        rows64 = rows.to(tl.int64)[:, None]
        if KEEP:
            kept = pre + rows64 * W + columns[None, :]
            tl.store(kept, gate.to(pre.dtype.element_ty), mask=written)
            if GATED:
                tl.store(kept + H, up.to(pre.dtype.element_ty), mask=written)
        weight = tl.load(weights + pairs, mask=live, other=0.0).to(tl.float32)
        out = activation(gate, ACTIVATION) * weight[:, None]
        if GATED:
            out *= up
        tl.store(hidden + rows64 * H + columns[None, :], out.to(hidden.dtype.element_ty), mask=written)
