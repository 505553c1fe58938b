"""The common parts of the fused Hopper kernels: the producer, which gathers tokens or copies rows, and the consumers.

Imports Triton's Gluon. A tile has CONSUMERS * ROWS rows and COLUMNS columns of each of GATES matrices that lie side by
side in w; the stages, their barriers and the main loop are those of the grouped GEMM (`hopper_grouped/pipeline.py`).

Rows are gathered by asynchronous copies of 16 bytes. Products read shared memory through another path than the one by
which such copies write it. The producer therefore waits for its copies, fences, and only then marks the stage as full.
It does so LAG stages later, so that other copies are in flight meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from bexp.kernels.experts.fused.hopper_epilogue import pass_nothing_on, pass_on, pass_on_left
from bexp.kernels.experts.hopper_grouped.pipeline import jit, next_stage, sum_products
from bexp.kernels.experts.hopper_grouped.schedule import find_rows_tile, row_tiles
from bexp.kernels.gluon_names import thread_barrier


def kernel(function: Callable[..., Any]) -> Any:
    """Gluon's compiler for what is launched: another number of rows recompiles nothing."""
    return gluon.jit(function, do_not_specialize=["num_rows"])


@jit
def _tokens_of(
    token_of_row: gl.tensor, row: gl.tensor, num_rows: gl.tensor, BLOCK_M: gl.constexpr, layout: gl.constexpr
) -> gl.tensor:
    """The tokens of a tile's rows; behind the last row, its token again."""
    rows = gl.minimum(row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout)), num_rows - 1)
    return gl.load(token_of_row + rows)


@jit
def _gather(block: gl.tensor, pointers: gl.tensor, inside: gl.tensor, EVEN: gl.constexpr) -> None:
    """Start the copies of a block, with zeros where it is not `inside`."""
    if EVEN:
        async_copy.async_copy_global_to_shared(block, pointers)
    else:
        async_copy.async_copy_global_to_shared(block, pointers, mask=inside)
    async_copy.commit_group()


@jit
def _say_full(
    full: gl.tensor,
    stage: gl.tensor,
    exists: gl.tensor,
    BACK: gl.constexpr,
    UNDER_WAY: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """The copies are there of the stage that is BACK before `stage`, if it `exists`: all but the last UNDER_WAY."""
    async_copy.wait_group(UNDER_WAY)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(full.index(gl.where(stage < BACK, stage + STAGES - BACK, stage - BACK)), pred=exists)


@jit
def produce(
    x: gl.tensor,
    token_of_row: gl.tensor,
    w_desc: gl.tensor,
    ends: gl.tensor,
    num_experts: gl.tensor,
    num_rows: gl.tensor,
    K: gl.tensor,
    N: gl.tensor,
    full: gl.tensor,
    empty: gl.tensor,
    a: gl.tensor,
    b: gl.tensor,
    GATHERED: gl.constexpr,
    EVEN_K: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    GATES: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr,
) -> None:
    """The producer. x is a descriptor over rows (R, K), or with GATHERED a pointer to tokens (T, K).

    w_desc is over (E, K, GATES, N), or over (E, GATES, N, K) if TRANSPOSED.

    a (STAGES, rows, columns) and b (STAGES * GATES, ...) are its stages. Rows that follow the expert's are copied too.
    """
    BLOCK_M: gl.constexpr = a.shape[1]
    BLOCK_K: gl.constexpr = a.shape[2]
    W_BYTES: gl.constexpr = GATES * COLUMNS * BLOCK_K * 2
    X_BYTES: gl.constexpr = 0 if GATHERED else BLOCK_M * BLOCK_K * 2
    LAG: gl.constexpr = STAGES - 2
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_K, BLOCK_K // 8], [gl.num_warps(), 1], [1, 0])
    end_E, tiles_E, tiles_n, num_tiles = row_tiles(ends, num_experts, N, BLOCK_M, COLUMNS, EXPERTS)
    stage = 0
    parity = 1
    copied = 0
    columns = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))[None, :]
    first = gl.minimum(gl.program_id(0), num_tiles - 1)
    expert, row, _end, col = find_rows_tile(first, end_E, tiles_E, tiles_n, BLOCK_M, COLUMNS, GROUP_M)
    if GATHERED:
        tokens = _tokens_of(token_of_row, row, num_rows, BLOCK_M, layout)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        # The next tile's tokens are on their way while this one's rows are copied.
        following = gl.minimum(tile + gl.num_programs(0), num_tiles - 1)
        next_expert, next_row, _end, next_col = find_rows_tile(
            following, end_E, tiles_E, tiles_n, BLOCK_M, COLUMNS, GROUP_M
        )
        if GATHERED:
            pointers = x + tokens.to(gl.int64)[:, None] * K + columns
            next_tokens = _tokens_of(token_of_row, next_row, num_rows, BLOCK_M, layout)
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(empty.index(stage), parity)
            arrived = full.index(stage)
            mbarrier.expect(arrived, W_BYTES + X_BYTES)
            for gate in gl.static_range(GATES):
                if TRANSPOSED:
                    tma.async_copy_global_to_shared(
                        w_desc, [expert, gate, col, k], arrived, b.index(stage * GATES + gate)
                    )
                else:
                    tma.async_copy_global_to_shared(
                        w_desc, [expert, k, gate, col], arrived, b.index(stage * GATES + gate)
                    )
            if GATHERED:
                _gather(a.index(stage), pointers + k, columns < K - k, EVEN_K)
                _say_full(full, stage, copied >= LAG, LAG, LAG, STAGES)
                copied += 1
            else:
                tma.async_copy_global_to_shared(x, [row, k], arrived, a.index(stage))
            stage, parity = next_stage(stage, parity, STAGES)
        expert, row, col = next_expert, next_row, next_col
        if GATHERED:
            tokens = next_tokens
    if GATHERED:
        for late in gl.static_range(LAG):
            _say_full(full, stage, copied >= LAG - late, LAG - late, LAG - 1 - late, STAGES)


@jit
def _skip(
    steps: gl.tensor, stage: gl.tensor, parity: gl.tensor, full: gl.tensor, empty: gl.tensor, STAGES: gl.constexpr
) -> gl.tensor:
    """Free `steps` stages unread; the stage and parity after them."""
    for _step in range(steps):
        mbarrier.wait(full.index(stage), parity)
        mbarrier.arrive(empty.index(stage))
        stage, parity = next_stage(stage, parity, STAGES)
    return stage, parity


@jit
def multiply(
    PART: gl.constexpr,
    ends: gl.tensor,
    num_experts: gl.tensor,
    K: gl.tensor,
    N: gl.tensor,
    full: gl.tensor,
    empty: gl.tensor,
    filled: gl.tensor,
    free: gl.tensor,
    a: gl.tensor,
    b: gl.tensor,
    b_halves: gl.tensor,
    sums: gl.tensor,
    TRANSPOSED: gl.constexpr,
    GATES: gl.constexpr,
    COLUMNS: gl.constexpr,
    WIDTH: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr,
) -> None:
    """The consumer of the rows from PART * ROWS on of each tile.

    a (STAGES * CONSUMERS, ...) and b (STAGES, ...) are the stages again, and b_halves (STAGES * 2, ...) the halves of
    the columns. Rows all behind the expert's end are not multiplied, nor is a right half behind the last column.
    """
    ROWS: gl.constexpr = a.shape[1]
    BLOCK_K: gl.constexpr = a.shape[2]
    BLOCK_N: gl.constexpr = GATES * COLUMNS
    HALF: gl.constexpr = BLOCK_N // 2
    HALF_WIDTH: gl.constexpr = WIDTH if WIDTH < HALF else HALF
    end_E, tiles_E, tiles_n, num_tiles = row_tiles(ends, num_experts, N, CONSUMERS * ROWS, COLUMNS, EXPERTS)
    steps = gl.cdiv(K, BLOCK_K)
    stage = 0
    parity = 0
    tile_parity = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        _expert, row, end, col = find_rows_tile(tile, end_E, tiles_E, tiles_n, CONSUMERS * ROWS, COLUMNS, GROUP_M)
        if row + PART * ROWS >= end:
            stage, parity = _skip(steps, stage, parity, full, empty, STAGES)
            pass_nothing_on(filled, free, PART, tile_parity)
        elif GATES == 1 and col + HALF >= N:
            left, stage, parity = sum_products(
                steps,
                stage,
                parity,
                full,
                empty,
                a,
                b_halves,
                PART,
                ROWS,
                HALF,
                HALF_WIDTH,
                CONSUMERS,
                STAGES,
                TRANSPOSED,
                2,
            )
            pass_on_left(left, sums, filled, free, PART, tile_parity)
        else:
            acc, stage, parity = sum_products(
                steps, stage, parity, full, empty, a, b, PART, ROWS, BLOCK_N, WIDTH, CONSUMERS, STAGES, TRANSPOSED
            )
            pass_on(acc, sums, filled, free, PART, tile_parity)
        tile_parity = tile_parity ^ 1
