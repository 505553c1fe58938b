"""Kernels that sort token-expert pairs by expert, divide them into tiles, and sum a token's pairs.

The order is that of a stable counting sort. Every block of pairs counts its experts. A scan over (expert, block) gives
the place where each block's part of an expert begins. Every pair adds its rank among its block's pairs of that expert.
"""

from __future__ import annotations

import triton.language as tl

from bexp.kernels.jit import jit, kernel


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
    row_of_pair: tl.tensor,
    num_pairs: tl.tensor,
    num_blocks: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Writes each pair, its token, and its row; `scan` sums the counts up to each in (expert, block) order."""
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
    tl.store(row_of_pair + pairs, row, mask=live)


@jit
def lay_tiles_of(
    expert: tl.tensor,
    counts: tl.tensor,
    start: tl.tensor,
    first_tile: tl.tensor,
    tile_expert: tl.tensor,
    tile_row: tl.tensor,
    num_tiles: tl.tensor,
    E: tl.tensor,
    BLOCK_M: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Writes an expert's first tile, and expert and first row of its tiles; `counts` (BINS,) are all experts' rows."""
    bins = tl.arange(0, BINS)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(bins < expert, tiles, 0))
    mine = tl.sum(tl.where(bins == expert, tiles, 0))
    tl.store(first_tile + expert, first)
    for begin in range(0, mine, CHUNK):
        tile = begin + tl.arange(0, CHUNK)
        tl.store(tile_expert + first + tile, tl.zeros((CHUNK,), tl.int32) + expert, mask=tile < mine)
        tl.store(tile_row + first + tile, start + tile * BLOCK_M, mask=tile < mine)
    if expert == E - 1:
        tl.store(num_tiles, first + mine)


@jit
def place_expert(
    expert: tl.tensor,
    counts: tl.tensor,
    start: tl.tensor,
    ends: tl.tensor,
    largest_first: tl.tensor,
    E: tl.tensor,
    BINS: tl.constexpr,
) -> None:
    """Writes an expert's end, and the expert at its place by size."""
    bins = tl.arange(0, BINS)
    count = tl.sum(tl.where(bins == expert, counts, 0))
    larger = (counts > count) | ((counts == count) & (bins < expert))
    tl.store(largest_first + tl.sum((larger & (bins < E)).to(tl.int32)), expert)
    tl.store(ends + expert, start + count)


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
    start = tl.sum(tl.where(bins == expert, below, 0))
    place_expert(expert, counts, start, ends, largest_first, E, BINS)
    lay_tiles_of(expert, counts, start, first_tile, tile_expert, tile_row, num_tiles, E, BLOCK_M, BINS, CHUNK)


@kernel
def permute_few(
    routes: tl.tensor,
    pair_of_row: tl.tensor,
    token_of_row: tl.tensor,
    row_of_pair: tl.tensor,
    ends: tl.tensor,
    largest_first: tl.tensor,
    first_tile: tl.tensor,
    tile_expert: tl.tensor,
    tile_row: tl.tensor,
    num_tiles: tl.tensor,
    other_first_tile: tl.tensor,
    other_tile_expert: tl.tensor,
    other_tile_row: tl.tensor,
    other_num_tiles: tl.tensor,
    num_pairs: tl.tensor,
    E: tl.tensor,
    TOP_K: tl.constexpr,
    HEIGHT: tl.constexpr,
    OTHER_HEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """All of a permutation in one launch, with tiles of one or two heights, where every program looks at all pairs.

    The first E programs do what `lay_tiles` does. Each other one finds the rows of BLOCK pairs: a pair's row is the
    number of pairs with a lower expert, or with the same expert and a lower index.
    """
    program = tl.program_id(0)
    if program < E:
        bins = tl.arange(0, BINS)
        counts = tl.zeros((BINS,), dtype=tl.int32)
        for begin in range(0, num_pairs, CHUNK):
            pairs = begin + tl.arange(0, CHUNK)
            experts = tl.load(routes + pairs, mask=pairs < num_pairs, other=BINS - 1).to(tl.int32)
            counts += tl.histogram(experts, BINS)
        counts = tl.where(bins < E, counts, 0)
        start = tl.sum(tl.where(bins < program, counts, 0))
        place_expert(program, counts, start, ends, largest_first, E, BINS)
        lay_tiles_of(program, counts, start, first_tile, tile_expert, tile_row, num_tiles, E, HEIGHT, BINS, TILES)
        if OTHER_HEIGHT > 0:
            lay_tiles_of(
                program,
                counts,
                start,
                other_first_tile,
                other_tile_expert,
                other_tile_row,
                other_num_tiles,
                E,
                OTHER_HEIGHT,
                BINS,
                TILES,
            )
    else:
        mine = (program - E) * BLOCK + tl.arange(0, BLOCK)
        live = mine < num_pairs
        keys = tl.load(routes + mine, mask=live, other=0).to(tl.int32) * num_pairs + mine
        row = tl.zeros((BLOCK,), dtype=tl.int32)
        for begin in range(0, num_pairs, CHUNK):
            pairs = begin + tl.arange(0, CHUNK)
            experts = tl.load(routes + pairs, mask=pairs < num_pairs, other=E).to(tl.int32)
            below = (experts * num_pairs + pairs)[None, :] < keys[:, None]
            row += tl.sum(below.to(tl.int32), axis=1)
        tl.store(pair_of_row + row, mine, mask=live)
        tl.store(token_of_row + row, mine // TOP_K, mask=live)
        tl.store(row_of_pair + mine, row, mask=live)


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
    other_tokens: tl.tensor,
    out: tl.tensor,
    other_out: tl.tensor,
    token_of_row: tl.tensor,
    num_pairs: tl.tensor,
    D: tl.tensor,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """out (num_pairs, D): the tokens of the rows. Programs (., 1), if there are any, do it for the other tokens."""
    if tl.program_id(1) == 1:
        tokens = other_tokens
        out = other_out
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = (rows < num_pairs)[:, None]
    token = tl.load(token_of_row + rows, mask=rows < num_pairs, other=0).to(tl.int64)
    for start in range(0, D, BLOCK_D):
        columns = start + tl.arange(0, BLOCK_D)
        inside = live & (columns < D)[None, :]
        found = tl.load(tokens + token[:, None] * D + columns[None, :], mask=inside)
        tl.store(out + rows.to(tl.int64)[:, None] * D + columns[None, :], found, mask=inside)


@jit
def sum_block(
    program: tl.tensor,
    rows: tl.tensor,
    row_of_pair: tl.tensor,
    out: tl.tensor,
    num_pairs: tl.tensor,
    D: tl.tensor,
    TOP_K: tl.constexpr,
    BY_EXPERT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """out[t] = sum over k of the rows of pairs t * TOP_K + k, in float32 and in the order of k, for a block.

    The rows are in the pairs' order, or with BY_EXPERT in the experts'.
    """
    num_d = tl.cdiv(D, BLOCK_D)
    tokens = program // num_d * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = program % num_d * BLOCK_D + tl.arange(0, BLOCK_D)
    is_token = tokens < num_pairs // TOP_K
    live = is_token[:, None] & (columns < D)[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_D), dtype=tl.float32)
    for k in range(TOP_K):
        row = tokens * TOP_K + k
        if BY_EXPERT:
            row = tl.load(row_of_pair + row, mask=is_token, other=0)
        cells = row.to(tl.int64)[:, None] * D + columns[None, :]
        total += tl.load(rows + cells, mask=live, other=0.0).to(tl.float32)
    tl.store(out + tokens.to(tl.int64)[:, None] * D + columns[None, :], total.to(out.dtype.element_ty), mask=live)


@kernel
def sum_pairs(
    rows: tl.tensor,
    row_of_pair: tl.tensor,
    out: tl.tensor,
    num_pairs: tl.tensor,
    D: tl.tensor,
    TOP_K: tl.constexpr,
    BY_EXPERT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """out (T, D): the sums of each token's rows (T * TOP_K, D)."""
    sum_block(tl.program_id(0), rows, row_of_pair, out, num_pairs, D, TOP_K, BY_EXPERT, BLOCK_T, BLOCK_D)


@kernel
def finish_backward(
    rows: tl.tensor,
    row_of_pair: tl.tensor,
    grad_x: tl.tensor,
    partial: tl.tensor,
    grad_weights: tl.tensor,
    num_pairs: tl.tensor,
    num_blocks: tl.tensor,
    D: tl.tensor,
    SUMMANDS: tl.constexpr,
    TOP_K: tl.constexpr,
    BY_EXPERT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The first num_blocks programs write grad_weights (R,): the sums of partial (SUMMANDS, R) in their order.

    The others, if there are any, write grad_x as `sum_pairs` does.
    """
    program = tl.program_id(0)
    if program < num_blocks:
        pairs = program * BLOCK + tl.arange(0, BLOCK)
        live = pairs < num_pairs
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for n in range(SUMMANDS):
            total += tl.load(partial + num_pairs.to(tl.int64) * n + pairs, mask=live, other=0.0)
        tl.store(grad_weights + pairs, total.to(grad_weights.dtype.element_ty), mask=live)
    else:
        sum_block(program - num_blocks, rows, row_of_pair, grad_x, num_pairs, D, TOP_K, BY_EXPERT, BLOCK_T, BLOCK_D)
