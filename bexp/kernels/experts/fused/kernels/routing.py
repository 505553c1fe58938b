"""Kernels that sort token-expert pairs by expert, divide them into tiles, and sum a token's pairs.

The order is that of a stable counting sort. Every block of pairs counts its experts. A scan over (expert, block) gives
the place where each block's part of an expert begins. Every pair adds its rank among its block's pairs of that expert.
"""

from __future__ import annotations

import triton.language as tl

from bexp.kernels.jit import kernel


@kernel
def count_experts(
    routes: tl.tensor,
    counts: tl.tensor,
    num_pairs: tl.tensor,
    num_blocks: tl.tensor,
    E: tl.tensor,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
) -> None:
    """Writes counts (E, num_blocks): the pairs of each expert in each block of BLOCK pairs. BINS > E, a power of 2."""
    block = tl.program_id(0)
    pairs = block * BLOCK + tl.arange(0, BLOCK)
    experts = tl.load(routes + pairs, mask=pairs < num_pairs, other=BINS - 1).to(tl.int32)
    found = tl.histogram(experts, BINS)
    bins = tl.arange(0, BINS)
    tl.store(counts + bins.to(tl.int64) * num_blocks + block, found, mask=bins < E)


@kernel
def place_pairs(
    routes: tl.tensor,
    scan: tl.tensor,
    pair_of_row: tl.tensor,
    token_of_row: tl.tensor,
    num_pairs: tl.tensor,
    num_blocks: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Writes each pair, and its token, to its row; `scan` sums the counts up to each in (expert, block) order."""
    block = tl.program_id(0)
    first = block * BLOCK
    local = tl.arange(0, BLOCK)
    pairs = first + local
    live = pairs < num_pairs
    experts = tl.load(routes + pairs, mask=live, other=0).to(tl.int32)
    rank = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, BLOCK, CHUNK):
        others = start + tl.arange(0, CHUNK)
        theirs = tl.load(routes + first + others, mask=first + others < num_pairs, other=-1).to(tl.int32)
        before = (experts[:, None] == theirs[None, :]) & (others[None, :] < local[:, None])
        rank += tl.sum(before.to(tl.int32), axis=1)
    cell = experts.to(tl.int64) * num_blocks + block
    row = tl.load(scan + cell - 1, mask=live & (cell > 0), other=0) + rank
    tl.store(pair_of_row + row, pairs, mask=live)
    tl.store(token_of_row + row, pairs // TOP_K, mask=live)


@kernel
def lay_tiles(
    scan: tl.tensor,
    ends: tl.tensor,
    largest_first: tl.tensor,
    first_tile: tl.tensor,
    tile_expert: tl.tensor,
    tile_row: tl.tensor,
    num_tiles: tl.tensor,
    num_blocks: tl.tensor,
    E: tl.tensor,
    BLOCK_M: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """One program an expert: its end, its place by size, its first tile, and expert and first row of its tiles.

    A tile has BLOCK_M rows. `num_tiles` gets the number of them all. The tables are as long as there could be tiles;
    their tail is not written.
    """
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    real = bins < E
    last = (bins + 1).to(tl.int64) * num_blocks - 1
    upto = tl.load(scan + last, mask=real, other=0)
    below = tl.load(scan + last - num_blocks, mask=real & (bins > 0), other=0)
    counts = upto - below
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    count = tl.sum(tl.where(bins == expert, counts, 0))
    start = tl.sum(tl.where(bins == expert, below, 0))
    first = tl.sum(tl.where(bins < expert, tiles, 0))
    larger = (counts > count) | ((counts == count) & (bins < expert))
    tl.store(largest_first + tl.sum((larger & real).to(tl.int32)), expert)
    tl.store(ends + expert, start + count)
    tl.store(first_tile + expert, first)
    mine = (count + BLOCK_M - 1) // BLOCK_M
    for begin in range(0, mine, CHUNK):
        tile = begin + tl.arange(0, CHUNK)
        tl.store(tile_expert + first + tile, tl.zeros((CHUNK,), tl.int32) + expert, mask=tile < mine)
        tl.store(tile_row + first + tile, start + tile * BLOCK_M, mask=tile < mine)
    if expert == E - 1:
        tl.store(num_tiles, first + mine)


@kernel
def gather_tiles(
    tokens: tl.tensor,
    out: tl.tensor,
    token_of_row: tl.tensor,
    ends: tl.tensor,
    tile_expert: tl.tensor,
    tile_row: tl.tensor,
    num_tiles: tl.tensor,
    D: tl.tensor,
    HEIGHT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """out (tiles * HEIGHT, D): each tile's tokens, and zeros behind its expert's end."""
    first = tl.program_id(0) * BLOCK_R
    tile = first // HEIGHT
    if tile < tl.load(num_tiles):
        rows = tl.load(tile_row + tile) + first % HEIGHT + tl.arange(0, BLOCK_R)
        live = rows < tl.load(ends + tl.load(tile_expert + tile))
        token = tl.load(token_of_row + rows, mask=live, other=0).to(tl.int64)
        places = (first + tl.arange(0, BLOCK_R)).to(tl.int64)
        for start in range(0, D, BLOCK_D):
            columns = start + tl.arange(0, BLOCK_D)
            inside = (columns < D)[None, :]
            found = tl.load(tokens + token[:, None] * D + columns[None, :], mask=live[:, None] & inside, other=0.0)
            tl.store(out + places[:, None] * D + columns[None, :], found, mask=(places >= 0)[:, None] & inside)


@kernel
def gather_rows(
    tokens: tl.tensor,
    out: tl.tensor,
    token_of_row: tl.tensor,
    num_pairs: tl.tensor,
    D: tl.tensor,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """out (num_pairs, D): the tokens of the rows."""
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = (rows < num_pairs)[:, None]
    token = tl.load(token_of_row + rows, mask=rows < num_pairs, other=0).to(tl.int64)
    for start in range(0, D, BLOCK_D):
        columns = start + tl.arange(0, BLOCK_D)
        inside = live & (columns < D)[None, :]
        found = tl.load(tokens + token[:, None] * D + columns[None, :], mask=inside)
        tl.store(out + rows.to(tl.int64)[:, None] * D + columns[None, :], found, mask=inside)


@kernel
def sum_pairs(
    rows: tl.tensor,
    out: tl.tensor,
    num_pairs: tl.tensor,
    D: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """out[t] = sum over k of rows[t * TOP_K + k], in float32 and in the order of k."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    live = (tokens < num_pairs // TOP_K)[:, None] & (columns < D)[None, :]
    cells = (tokens.to(tl.int64) * TOP_K)[:, None] * D + columns[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_D), dtype=tl.float32)
    for k in range(TOP_K):
        total += tl.load(rows + cells + k * D, mask=live, other=0.0).to(tl.float32)
    tl.store(out + tokens.to(tl.int64)[:, None] * D + columns[None, :], total.to(out.dtype.element_ty), mask=live)
