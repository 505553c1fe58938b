"""Grouped GEMMs whose output has one row a token-expert pair: rows times their expert's matrix.

A tile of rows belongs to one expert. Rows past the expert's end are computed on whatever lies there and never stored.
Weights come by pointers or, with TMA, by descriptors over (E, K, N). Programs take tiles in turn until none is left,
so that the same code serves a grid of one program a tile and one of a few programs a multiprocessor.
"""

from __future__ import annotations

import triton.language as tl

from workers.kernels.experts.fused.elementwise import activation, activation_slope
from workers.kernels.jit import jit, kernel


@jit
def tile_of(index: tl.tensor, num_m: tl.tensor, num_n: tl.tensor, GROUP: tl.constexpr) -> tl.tensor:
    """Row and column of a tile, in bands of GROUP rows, so that what runs together shares rows and columns in L2."""
    band = index // (GROUP * num_n)
    height = tl.minimum(num_m - band * GROUP, GROUP)
    inside = index - band * GROUP * num_n
    return band * GROUP + inside % height, inside // height


@jit
def load_weight(
    w: tl.tensor,
    pointers: tl.tensor,
    expert: tl.tensor,
    k: tl.tensor,
    n: tl.tensor,
    stride: tl.tensor,
    mask: tl.tensor,
    TRANSPOSED: tl.constexpr,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """A (BLOCK_K, BLOCK_N) tile of an expert's matrix, stored as (K, N), or (N, K) when TRANSPOSED."""
    if TMA:
        if TRANSPOSED:
            tile = w.load([expert, n, k]).reshape(BLOCK_N, BLOCK_K).T
        else:
            tile = w.load([expert, k, n]).reshape(BLOCK_K, BLOCK_N)
    else:
        tile = tl.load(pointers + k * stride, mask=mask, other=0.0) if MASKED else tl.load(pointers + k * stride)
        if TRANSPOSED:
            tile = tile.T
    return tile


@kernel
def project_in(
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
    PADDED: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
    SPECIALIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """hidden[r] = weight[r] act(x[token] w_gate) * (x[token] w_up), the tokens gathered as the tiles are loaded.

    With KEEP both products are written to `pre` (R, 2H) as well, for backward. x (T, D), w (E, D, 2H or H). When PADDED
    the tokens were gathered before: x is a descriptor over tiles of BLOCK_M rows.
    """
    W = 2 * H if GATED else H
    num_m = tl.load(num_tiles)
    num_n = tl.cdiv(H, BLOCK_N)
    for index in tl.range(
        tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLATTEN, warp_specialize=SPECIALIZE
    ):
        m, n = tile_of(index, num_m, num_n, GROUP)
        expert = tl.load(tile_expert + m)
        rows = tl.load(tile_row + m) + tl.arange(0, BLOCK_M)
        live = rows < tl.load(ends + expert)
        pairs = tl.load(pair_of_row + rows, mask=live, other=0)
        ks = tl.arange(0, BLOCK_K)
        columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
        x_pointers = ks
        if not PADDED:
            x_pointers = x + (pairs // TOP_K).to(tl.int64)[:, None] * D + ks[None, :]
        w_pointers = ks
        if not TMA:
            w_pointers = w + expert.to(tl.int64) * D * W + ks[:, None] * W + columns[None, :]
        gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, D, BLOCK_K):
            if PADDED:
                a = x.load([m * BLOCK_M, k])
            elif EVEN_K:
                a = tl.load(x_pointers + k)
            else:
                a = tl.load(x_pointers + k, mask=(ks < D - k)[None, :], other=0.0)
            mask = (ks < D - k)[:, None] & (columns < H)[None, :]
            b = load_weight(
                w, w_pointers, expert, k, n * BLOCK_N, W, mask, False, not (EVEN_K and EVEN_N), TMA, BLOCK_N, BLOCK_K
            )
            gate = tl.dot(a, b, gate, input_precision=PRECISION)
            if GATED:
                b = load_weight(
                    w,
                    w_pointers + H,
                    expert,
                    k,
                    H + n * BLOCK_N,
                    W,
                    mask,
                    False,
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


@kernel
def project_back(
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
    SPECIALIZE: tl.constexpr,
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
    for index in tl.range(
        tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLATTEN, warp_specialize=SPECIALIZE
    ):
        m, n = tile_of(index, num_m, num_n, GROUP)
        expert = tl.load(tile_expert + m)
        first = tl.load(tile_row + m)
        rows = first + tl.arange(0, BLOCK_M)
        live = rows < tl.load(ends + expert)
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


@jit
def halves(tile: tl.tensor, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr) -> tl.tensor:
    """The left and the right columns of a (BLOCK_M, BLOCK_N) tile."""
    return tile.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()


@jit
def finish_hidden(
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
def finish_halves(
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
    """`finish_hidden` of the left and then of the right half, which takes fewer registers."""
    HALF: tl.constexpr = COLUMNS // 2
    left, right = halves(grad, BLOCK_M, COLUMNS)
    total = finish_hidden(left, weight, pre, grad_pre, hidden, rows, live, first_column, W, H, GATED, ACTIVATION, HALF)
    return total + finish_hidden(
        right, weight, pre, grad_pre, hidden, rows, live, first_column + HALF, W, H, GATED, ACTIVATION, HALF
    )


@kernel
def differentiate_hidden(
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
    PADDED: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
    SPECIALIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """The gradient of what `project_in` multiplied, from that of the output, gathered as the tiles are loaded.
    When PADDED it was gathered before: grad_out is a descriptor over tiles of BLOCK_M rows.

    Writes grad_pre (R, 2H or H); hidden (R, H) as `project_in` did, computed from `pre` again; and partial
    (H / BLOCK_N, R): each pair's gradient of its routing weight, one summand a tile of columns. w_out (E, H, D).
    """
    W = 2 * H if GATED else H
    num_m = tl.load(num_tiles)
    num_n = tl.cdiv(H, BLOCK_N)
    for index in tl.range(
        tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLATTEN, warp_specialize=SPECIALIZE
    ):
        m, n = tile_of(index, num_m, num_n, GROUP)
        expert = tl.load(tile_expert + m)
        rows = tl.load(tile_row + m) + tl.arange(0, BLOCK_M)
        live = rows < tl.load(ends + expert)
        pairs = tl.load(pair_of_row + rows, mask=live, other=0)
        ks = tl.arange(0, BLOCK_K)
        columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
        grad_pointers = ks
        if not PADDED:
            grad_pointers = grad_out + (pairs // TOP_K).to(tl.int64)[:, None] * D + ks[None, :]
        w_pointers = ks
        if not TMA:
            w_pointers = w_out + expert.to(tl.int64) * H * D + columns[:, None] * D + ks[None, :]
        grad = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, D, BLOCK_K):
            inner = ks < D - k
            if PADDED:
                g = grad_out.load([m * BLOCK_M, k])
            elif EVEN_K:
                g = tl.load(grad_pointers + k)
            else:
                g = tl.load(grad_pointers + k, mask=inner[None, :], other=0.0)
            mask = inner[None, :] & (columns < H)[:, None]
            b = load_weight(
                w_out, w_pointers, expert, k, n * BLOCK_N, 1, mask, True, not (EVEN_K and EVEN_N), TMA, BLOCK_N, BLOCK_K
            )
            grad = tl.dot(g, b, grad, input_precision=PRECISION)
        weight = tl.load(weights + pairs, mask=live, other=0.0).to(tl.float32)
        column = n * BLOCK_N
        if PARTS == 1:
            summand = finish_hidden(
                grad, weight, pre, grad_pre, hidden, rows, live, column, W, H, GATED, ACTIVATION, BLOCK_N
            )
        elif PARTS == 2:
            summand = finish_halves(
                grad, weight, pre, grad_pre, hidden, rows, live, column, W, H, GATED, ACTIVATION, BLOCK_M, BLOCK_N
            )
        else:
            HALF: tl.constexpr = BLOCK_N // 2
            left, right = halves(grad, BLOCK_M, BLOCK_N)
            summand = finish_halves(
                left, weight, pre, grad_pre, hidden, rows, live, column, W, H, GATED, ACTIVATION, BLOCK_M, HALF
            )
            column += HALF
            summand += finish_halves(
                right, weight, pre, grad_pre, hidden, rows, live, column, W, H, GATED, ACTIVATION, BLOCK_M, HALF
            )
        tl.store(partial + n.to(tl.int64) * num_pairs + pairs, summand, mask=live)
