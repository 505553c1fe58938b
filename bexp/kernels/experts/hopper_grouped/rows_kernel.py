"""Each expert's rows by its matrix, on Hopper: forward, and backward to the rows. Imports Triton's Gluon."""

# ruff: noqa: RUF005 - the language of the kernels has no unpacking
from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from bexp.kernels.experts.hopper_grouped.pipeline import (
    free_buffer,
    halves,
    jit,
    make_barriers,
    next_slot,
    next_stage,
    sum_products,
)
from bexp.kernels.experts.hopper_grouped.schedule import find_rows_tile, row_tiles
from bexp.kernels.gluon_names import thread_barrier


@jit
def _load(
    x_desc: gl.tensor,
    w_desc: gl.tensor,
    ends: gl.tensor,
    num_experts: gl.tensor,
    K: gl.tensor,
    N: gl.tensor,
    full: gl.tensor,
    empty: gl.tensor,
    a: gl.tensor,
    b: gl.tensor,
    WIDTH: gl.constexpr,
    BUFFERS: gl.constexpr,
    CONSUMERS: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr,
    TRANSPOSED: gl.constexpr,
) -> None:
    """The producer: rows that follow the expert's are copied too, and not written later."""
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    STAGE_BYTES: gl.constexpr = (BLOCK_M + BLOCK_N) * BLOCK_K * 2
    end_E, tiles_E, tiles_n, num_tiles = row_tiles(ends, num_experts, N, BLOCK_M, BLOCK_N, EXPERTS)
    stage = 0
    parity = 1
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, row, _end, col = find_rows_tile(tile, end_E, tiles_E, tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(empty.index(stage), parity)
            arrived = full.index(stage)
            mbarrier.expect(arrived, STAGE_BYTES)
            if TRANSPOSED:
                tma.async_copy_global_to_shared(w_desc, [expert, col, k], arrived, b.index(stage))
            else:
                tma.async_copy_global_to_shared(w_desc, [expert, k, col], arrived, b.index(stage))
            for part in gl.static_range(CONSUMERS):
                tma.async_copy_global_to_shared(
                    x_desc, [row + part * ROWS, k], arrived, a.index(stage * CONSUMERS + part)
                )
            stage, parity = next_stage(stage, parity, STAGES)


@jit
def _store(
    buffer: gl.tensor,
    out: gl.tensor,
    places: gl.tensor,
    row: gl.tensor,
    end: gl.tensor,
    col: gl.tensor,
    N: gl.tensor,
    stride_out: gl.tensor,
    SCATTERED: gl.constexpr,
) -> None:
    """A buffer's rows before `end` and columns before N, without a bulk copy; if SCATTERED, each row to its place."""
    ROWS: gl.constexpr = buffer.shape[0]
    COLUMNS: gl.constexpr = buffer.shape[1]
    thread_barrier()
    lanes: gl.constexpr = COLUMNS // 8 if COLUMNS < 256 else 32
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [gl.num_warps(), 1], [1, 0])
    values = buffer.load(layout)
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    cols = col + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    inside = rows < end
    if SCATTERED:
        rows = gl.load(places + rows, mask=inside, other=0)
    gl.store(out + rows.to(gl.int64)[:, None] * stride_out + cols, values, mask=inside[:, None] & (cols < N))


@jit
def _write(
    result: gl.tensor,
    out_desc: gl.tensor,
    out: gl.tensor,
    places: gl.tensor,
    row: gl.tensor,
    end: gl.tensor,
    col: gl.tensor,
    N: gl.tensor,
    stride_out: gl.tensor,
    buffers: gl.tensor,
    slot: gl.tensor,
    PART: gl.constexpr,
    BUFFERS: gl.constexpr,
    SCATTERED: gl.constexpr,
) -> gl.tensor:
    """Rows before `end` and columns before N from (row, col) on, in pieces of a buffer's columns; the next slot."""
    ROWS: gl.constexpr = buffers.shape[1]
    COLUMNS: gl.constexpr = buffers.shape[2]
    if result.shape[1] > COLUMNS:
        half: gl.constexpr = result.shape[1] // 2
        left, right = halves(result)
        slot = _write(
            left, out_desc, out, places, row, end, col, N, stride_out, buffers, slot, PART, BUFFERS, SCATTERED
        )
        slot = _write(
            right, out_desc, out, places, row, end, col + half, N, stride_out, buffers, slot, PART, BUFFERS, SCATTERED
        )
    else:
        buffer = free_buffer(buffers, slot, PART, BUFFERS)
        buffer.store(result)
        if SCATTERED:
            _store(buffer, out, places, row, end, col, N, stride_out, SCATTERED)
            slot = next_slot(slot, BUFFERS)
        elif row + ROWS <= end:
            fence_async_shared()
            thread_barrier()
            tma.async_copy_shared_to_global(out_desc, [row, col], buffer)
            slot = next_slot(slot, BUFFERS)
        else:
            _store(buffer, out, places, row, end, col, N, stride_out, SCATTERED)
    return slot


@jit
def _multiply(
    PART: gl.constexpr,
    SCATTERED: gl.constexpr,
    out_desc: gl.tensor,
    out: gl.tensor,
    places: gl.tensor,
    ends: gl.tensor,
    num_experts: gl.tensor,
    K: gl.tensor,
    N: gl.tensor,
    stride_out: gl.tensor,
    full: gl.tensor,
    empty: gl.tensor,
    a: gl.tensor,
    b: gl.tensor,
    buffers: gl.tensor,
    WIDTH: gl.constexpr,
    BUFFERS: gl.constexpr,
    CONSUMERS: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr,
    TRANSPOSED: gl.constexpr,
) -> None:
    """The consumer of the rows from PART * ROWS on of each tile."""
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    end_E, tiles_E, tiles_n, num_tiles = row_tiles(ends, num_experts, N, BLOCK_M, BLOCK_N, EXPERTS)
    steps = gl.cdiv(K, BLOCK_K)
    stage = 0
    parity = 0
    slot = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        _expert, row, end, col = find_rows_tile(tile, end_E, tiles_E, tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
        acc, stage, parity = sum_products(
            steps, stage, parity, full, empty, a, b, PART, ROWS, BLOCK_N, WIDTH, CONSUMERS, STAGES, TRANSPOSED
        )
        row += PART * ROWS
        if row < end:
            result = acc.to(out_desc.dtype)
            slot = _write(
                result, out_desc, out, places, row, end, col, N, stride_out, buffers, slot, PART, BUFFERS, SCATTERED
            )
    tma.store_wait(0)


@jit
def rows_kernel(
    x_desc: gl.tensor,
    w_desc: gl.tensor,
    out_desc: gl.tensor,
    out: gl.tensor,
    places: gl.tensor,
    ends: gl.tensor,
    num_experts: gl.tensor,
    K: gl.tensor,
    N: gl.tensor,
    stride_out: gl.tensor,
    CONSUMERS: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    SCATTERED: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
) -> None:
    """out[rows of e] = x[rows of e] @ w[e], with w[e] as (K, N), or (N, K) where TRANSPOSED.

    A tile has CONSUMERS * ROWS rows and BLOCK_N columns, and is written in pieces of the columns of out's descriptor.
    If SCATTERED, row i is written to the row places[i] of out.
    """
    gl.static_assert(CONSUMERS <= 3 and STAGES >= 2)
    dtype: gl.constexpr = x_desc.dtype
    a = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS, ROWS, BLOCK_K], x_desc.layout)
    b = gl.allocate_shared_memory(dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    buffers = gl.allocate_shared_memory(dtype, [CONSUMERS * BUFFERS] + out_desc.block_type.shape, out_desc.layout)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, CONSUMERS)
    fence_async_shared()
    sizes: gl.constexpr = (WIDTH, BUFFERS, CONSUMERS, ROWS, BLOCK_N, BLOCK_K, STAGES, GROUP_M, EXPERTS, TRANSPOSED)
    load = (x_desc, w_desc, ends, num_experts, K, N, full, empty, a, b)
    multiply = (out_desc, out, places, ends, num_experts, K, N, stride_out, full, empty, a, b, buffers)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [(_multiply, (0, SCATTERED) + multiply + sizes), (_load, load + sizes)], [1], [PRODUCER_REGISTERS]
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_multiply, (0, SCATTERED) + multiply + sizes),
                (_multiply, (1, SCATTERED) + multiply + sizes),
                (_load, load + sizes),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (0, SCATTERED) + multiply + sizes),
                (_multiply, (1, SCATTERED) + multiply + sizes),
                (_multiply, (2, SCATTERED) + multiply + sizes),
                (_load, load + sizes),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
