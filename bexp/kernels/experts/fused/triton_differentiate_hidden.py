"""Backward through the second projection, with the activation's and the routing weight's gradients as its epilogue."""

from __future__ import annotations

import triton.language as tl

from bexp.kernels.experts.fused.elementwise import activation, activation_slope
from bexp.kernels.experts.fused.tile_loads import load_weight, rows_of_tile, tile_of
from bexp.kernels.jit import jit, kernel


@jit
def halves(tile: tl.tensor, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr) -> tl.tensor:
    """The left and the right columns of a (BLOCK_M, BLOCK_N) tile."""
    return tile.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()


@jit
def epilogue(
    grad: tl.tensor,
    weight: tl.tensor,
    pre: tl.tensor,
    grad_pre: tl.tensor,
    hidden: tl.tensor,
    rows: tl.tensor,
    live: tl.tensor,
    first_column: tl.tensor,
    W: tl.tensor,
    H: tl.tensor,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Stores some columns of what `differentiate_hidden` writes; returns their part of the weights' gradient."""
    columns = first_column + tl.arange(0, COLUMNS)
    written = live[:, None] & (columns < H)[None, :]
    cells = rows.to(tl.int64)[:, None] * W + columns[None, :]
    element = grad_pre.dtype.element_ty
    gate = tl.load(pre + cells, mask=written, other=0.0).to(tl.float32)
    product = activation(gate, ACTIVATION)
    slope = activation_slope(gate, ACTIVATION)
    weighted = grad * weight[:, None]
    if GATED:
        up = tl.load(pre + cells + H, mask=written, other=0.0).to(tl.float32)
        tl.store(grad_pre + cells + H, (weighted * product).to(element), mask=written)
        weighted *= up
        product *= up
    tl.store(grad_pre + cells, (weighted * slope).to(element), mask=written)
    tl.store(
        hidden + rows.to(tl.int64)[:, None] * H + columns[None, :],
        (product * weight[:, None]).to(element),
        mask=written,
    )
    return tl.sum(tl.where(written, grad * product, 0.0), axis=1)


@jit
def epilogue_in_halves(
    grad: tl.tensor,
    weight: tl.tensor,
    pre: tl.tensor,
    grad_pre: tl.tensor,
    hidden: tl.tensor,
    rows: tl.tensor,
    live: tl.tensor,
    first_column: tl.tensor,
    W: tl.tensor,
    H: tl.tensor,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """`epilogue` of the left and then of the right half, which takes fewer registers."""
    HALF: tl.constexpr = COLUMNS // 2
    left, right = halves(grad, BLOCK_M, COLUMNS)
    total = epilogue(left, weight, pre, grad_pre, hidden, rows, live, first_column, W, H, GATED, ACTIVATION, HALF)
    return total + epilogue(
        right, weight, pre, grad_pre, hidden, rows, live, first_column + HALF, W, H, GATED, ACTIVATION, HALF
    )


@kernel
def differentiate_hidden_kernel(
    grad_out: tl.tensor,
    w_out: tl.tensor,
    pre: tl.tensor,
    grad_pre: tl.tensor,
    hidden: tl.tensor,
    weights: tl.tensor,
    partial: tl.tensor,
    pair_of_row: tl.tensor,
    tile_expert: tl.tensor,
    tile_row: tl.tensor,
    num_tiles: tl.tensor,
    ends: tl.tensor,
    num_pairs: tl.tensor,
    D: tl.tensor,
    H: tl.tensor,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PARTS: tl.constexpr,
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
    """The gradient of what `gate_up_gemm` multiplied, from that of the output, gathered as the tiles are loaded.
    When PADDED it was gathered before: grad_out is a descriptor over tiles of BLOCK_M rows.

    Writes grad_pre (R, 2H or H); hidden (R, H) as `gate_up_gemm` did, computed from `pre` again; and partial
    (H / BLOCK_N, R): each pair's gradient of its routing weight, one summand a tile of columns. w_out (E, H, D) when
    TRANSPOSED, since its transpose is the factor, else (E, D, H).
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
        grad_pointers = ks
        if not PADDED:
            grad_pointers = grad_out + (pairs // TOP_K).to(tl.int64)[:, None] * D + ks[None, :]
        w_pointers = ks
        if TRANSPOSED:
            stride = 1
            if not TMA:
                w_pointers = w_out + expert.to(tl.int64) * H * D + columns[:, None] * D + ks[None, :]
        else:
            stride = H
            if not TMA:
                w_pointers = w_out + expert.to(tl.int64) * H * D + ks[:, None] * H + columns[None, :]
        grad = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, D, BLOCK_K):
            inner = ks < D - k
            if PADDED:
                g = grad_out.load([m * BLOCK_M, k])
            elif EVEN_K:
                g = tl.load(grad_pointers + k)
            else:
                g = tl.load(grad_pointers + k, mask=inner[None, :], other=0.0)
            if TRANSPOSED:  # noqa: SIM108 - the two have different shapes
                mask = inner[None, :] & (columns < H)[:, None]
            else:
                mask = inner[:, None] & (columns < H)[None, :]
            b = load_weight(
                w_out,
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
            grad = tl.dot(g, b, grad, input_precision=PRECISION)
        weight = tl.load(weights + pairs, mask=live, other=0.0).to(tl.float32)
        column = n * BLOCK_N
        if PARTS == 1:
            summand = epilogue(
                grad, weight, pre, grad_pre, hidden, rows, live, column, W, H, GATED, ACTIVATION, BLOCK_N
            )
        elif PARTS == 2:
            summand = epilogue_in_halves(
                grad, weight, pre, grad_pre, hidden, rows, live, column, W, H, GATED, ACTIVATION, BLOCK_M, BLOCK_N
            )
        else:
            HALF: tl.constexpr = BLOCK_N // 2
            left, right = halves(grad, BLOCK_M, BLOCK_N)
            summand = epilogue_in_halves(
                left, weight, pre, grad_pre, hidden, rows, live, column, W, H, GATED, ACTIVATION, BLOCK_M, HALF
            )
            column += HALF
            summand += epilogue_in_halves(
                right, weight, pre, grad_pre, hidden, rows, live, column, W, H, GATED, ACTIVATION, BLOCK_M, HALF
            )
        tl.store(partial + n.to(tl.int64) * num_pairs + pairs, summand, mask=live)
