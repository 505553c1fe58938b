"""The tile that a program of a grouped GEMM works on, and its loads.

A tile of rows belongs to one expert. Rows past the expert's end are computed on arbitrary data and never stored.
Weights come by pointers or, with TMA, by descriptors over (E, K, N). Programs take tiles in turn until none is left,
so that the same code serves a grid of one program a tile and one of a few programs a multiprocessor.
"""

from __future__ import annotations

import triton.language as tl

from bexp.kernels.jit import jit


@jit
def tile_of(index: tl.tensor, num_m: tl.tensor, num_n: tl.tensor, GROUP: tl.constexpr) -> tl.tensor:
    """Row and column of a tile, in bands of GROUP rows, so that what runs together shares rows and columns in L2."""
    band = index // (GROUP * num_n)
    height = tl.minimum(num_m - band * GROUP, GROUP)
    inside = index - band * GROUP * num_n
    return band * GROUP + inside % height, inside // height


@jit
def rows_of_tile(
    m: tl.tensor, tile_expert: tl.tensor, tile_row: tl.tensor, ends: tl.tensor, BLOCK_M: tl.constexpr
) -> tl.tensor:
    """The expert of a tile of rows, its rows, and which of them are the expert's."""
    expert = tl.load(tile_expert + m)
    rows = tl.load(tile_row + m) + tl.arange(0, BLOCK_M)
    return expert, rows, rows < tl.load(ends + expert)


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


@jit
def load_rows(
    x: tl.tensor,
    token_of_row: tl.tensor,
    first: tl.tensor,
    padded_first: tl.tensor,
    end: tl.tensor,
    column: tl.tensor,
    WIDTH: tl.tensor,
    LAYOUT: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> tl.tensor:
    """A (BLOCK_R, BLOCK_C) tile of x: rows, or the tokens of rows. Without TMA rows from `end` on are zero."""
    if LAYOUT == "padded":
        tile = x.load([padded_first, column])
    elif TMA and LAYOUT == "rows":
        tile = x.load([first, column])
    else:
        rows = first + tl.arange(0, BLOCK_R)
        columns = column + tl.arange(0, BLOCK_C)
        live = rows < end
        if LAYOUT == "tokens":
            rows = tl.load(token_of_row + rows, mask=live, other=0)
        mask = live[:, None]
        if not EVEN:
            mask = mask & (columns < WIDTH)[None, :]
        tile = tl.load(x + rows.to(tl.int64)[:, None] * WIDTH + columns[None, :], mask=mask, other=0.0)
    return tile
