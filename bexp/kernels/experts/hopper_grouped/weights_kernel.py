"""The sum over each expert's rows, on Hopper: backward to the matrices. Imports Triton's Gluon."""

# ruff: noqa: RUF005 - the language of the kernels has no unpacking
from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from bexp.kernels.experts.hopper_grouped.pipeline import (
    accumulator,
    finish_products,
    free_buffer,
    halves,
    jit,
    make_barriers,
    make_visible,
    next_slot,
    next_stage,
    operand,
    start_products,
)
from bexp.kernels.experts.hopper_grouped.schedule import find_weights_tile, heaviest_first
from bexp.kernels.experts.hopper_grouped.tile_scheduler import (
    SLOTS,
    claim_tile,
    claimed_tile,
    make_messages,
    receive_tile,
    send_tile,
)


@jit
def _load(
    x_desc: gl.tensor,
    grad_desc: gl.tensor,
    ends: gl.tensor,
    counter: gl.tensor,
    num_experts: gl.tensor,
    K: gl.tensor,
    N: gl.tensor,
    full: gl.tensor,
    empty: gl.tensor,
    messages: gl.tensor,
    sent: gl.tensor,
    taken: gl.tensor,
    a: gl.tensor,
    b: gl.tensor,
    WIDTH: gl.constexpr,
    BUFFERS: gl.constexpr,
    CONSUMERS: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_R: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr,
    DYNAMIC: gl.constexpr,
) -> None:
    """The producer: the last block holds rows that follow the expert's, which the consumers put to zero."""
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    STAGE_BYTES: gl.constexpr = (BLOCK_M + BLOCK_N) * BLOCK_R * 2
    tiles_m = gl.cdiv(K, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    num_tiles = num_experts * tiles_m * tiles_n
    stage = 0
    parity = 1
    slot = 0
    slot_parity = 1
    place_E = heaviest_first(ends, num_experts, EXPERTS) if DYNAMIC else None
    tile = gl.program_id(0)
    expert, start, end, row, col = find_weights_tile(
        tile, place_E, ends, num_experts, tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP_M
    )
    while tile < num_tiles:
        if DYNAMIC:
            claim = claim_tile(counter)
            slot, slot_parity = send_tile(expert, start, end, row, col, slot, slot_parity, messages, sent, taken)
        for at in range(start, end, BLOCK_R):
            mbarrier.wait(empty.index(stage), parity)
            arrived = full.index(stage)
            mbarrier.expect(arrived, STAGE_BYTES)
            tma.async_copy_global_to_shared(grad_desc, [at, col], arrived, b.index(stage))
            for part in gl.static_range(CONSUMERS):
                tma.async_copy_global_to_shared(
                    x_desc, [at, row + part * ROWS], arrived, a.index(stage * CONSUMERS + part)
                )
            stage, parity = next_stage(stage, parity, STAGES)
        if DYNAMIC:
            tile = gl.num_programs(0) + claimed_tile(claim)
        else:
            tile += gl.num_programs(0)
        expert, start, end, row, col = find_weights_tile(
            tile, place_E, ends, num_experts, tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP_M
        )
    if DYNAMIC:
        send_tile(num_experts, 0, 0, 0, 0, slot, slot_parity, messages, sent, taken)
        gl.store(counter, 0, mask=tile == num_tiles - 1 + gl.num_programs(0))


@jit
def _zero_from(block: gl.tensor, rest: gl.tensor, FIRST: gl.constexpr, STEP: gl.constexpr) -> None:
    """Rows from `rest` on become zero, in every STEP-th strip of 64 columns from FIRST on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, block.shape[0], gl.SliceLayout(1, layout))[:, None]
    for strip in gl.static_range(FIRST, block.shape[1] // 64, STEP):
        piece = block.slice(strip * 64, 64, 1)
        values = piece.load(layout)
        piece.store(gl.where(rows < rest, values, gl.zeros_like(values)))


@jit
def _add_partial(
    acc: gl.tensor,
    rest: gl.tensor,
    stage: gl.tensor,
    parity: gl.tensor,
    zeroed_parity: gl.tensor,
    full: gl.tensor,
    empty: gl.tensor,
    zeroed: gl.tensor,
    a: gl.tensor,
    b: gl.tensor,
    PART: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
) -> gl.tensor:
    """Add the product of the first `rest` rows of a stage, whose other rows are another expert's.

    The consumers share the work on the columns that all of them read, and wait for each other.
    """
    mbarrier.wait(full.index(stage), parity)
    a_block = a.index(stage * CONSUMERS + PART)
    b_block = operand(b.index(stage), b.shape[-2], b.shape[-1], False)
    _zero_from(a_block, rest, 0, 1)
    _zero_from(b_block, rest, PART, CONSUMERS)
    make_visible()
    if CONSUMERS > 1:
        mbarrier.arrive(zeroed.index(0))
        mbarrier.wait(zeroed.index(0), zeroed_parity)
    acc = warpgroup_mma(a_block.permute((1, 0)), b_block, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index(stage))
    stage, parity = next_stage(stage, parity, STAGES)
    return acc, stage, parity, zeroed_parity ^ 1


@jit
def _write(
    result: gl.tensor,
    out_desc: gl.tensor,
    expert: gl.tensor,
    row: gl.tensor,
    col: gl.tensor,
    buffers: gl.tensor,
    slot: gl.tensor,
    PART: gl.constexpr,
    BUFFERS: gl.constexpr,
) -> gl.tensor:
    """A part of an expert's matrix, in pieces of a buffer's columns; the next slot."""
    COLUMNS: gl.constexpr = buffers.shape[3]
    if result.shape[1] > COLUMNS:
        left, right = halves(result)
        slot = _write(left, out_desc, expert, row, col, buffers, slot, PART, BUFFERS)
        slot = _write(right, out_desc, expert, row, col + right.shape[1], buffers, slot, PART, BUFFERS)
    else:
        buffer = free_buffer(buffers, slot, PART, BUFFERS)
        buffer.reshape([buffers.shape[2], COLUMNS]).store(result)
        make_visible()
        tma.async_copy_shared_to_global(out_desc, [expert, row, col], buffer)
        slot = next_slot(slot, BUFFERS)
    return slot


@jit
def _multiply(
    PART: gl.constexpr,
    out_desc: gl.tensor,
    ends: gl.tensor,
    num_experts: gl.tensor,
    K: gl.tensor,
    N: gl.tensor,
    full: gl.tensor,
    empty: gl.tensor,
    zeroed: gl.tensor,
    messages: gl.tensor,
    sent: gl.tensor,
    taken: gl.tensor,
    a: gl.tensor,
    b: gl.tensor,
    buffers: gl.tensor,
    WIDTH: gl.constexpr,
    BUFFERS: gl.constexpr,
    CONSUMERS: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_R: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr,
    DYNAMIC: gl.constexpr,
) -> None:
    """The consumer of the rows from PART * ROWS on of each tile."""
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    tiles_m = gl.cdiv(K, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    stage = 0
    parity = 0
    zeroed_parity = 0
    slot = 0
    message_slot = 0
    message_parity = 0
    tile = gl.program_id(0)
    if DYNAMIC:
        expert, start, end, row, col, message_slot, message_parity = receive_tile(
            message_slot, message_parity, messages, sent, taken
        )
    else:
        expert, start, end, row, col = find_weights_tile(
            tile, None, ends, num_experts, tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP_M
        )
    while expert < num_experts:
        whole = (end - start) // BLOCK_R
        rest = (end - start) - whole * BLOCK_R
        acc, stage, parity = start_products(
            accumulator(ROWS, BLOCK_N, WIDTH),
            whole,
            stage,
            parity,
            full,
            empty,
            a,
            b,
            PART,
            CONSUMERS,
            STAGES,
            True,
            False,
        )
        if not DYNAMIC:
            # The next tile's bounds are on their way while this one's sums are written.
            tile += gl.num_programs(0)
            next_expert, next_start, next_end, next_row, next_col = find_weights_tile(
                tile, None, ends, num_experts, tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP_M
            )
        acc = finish_products(acc, whole, stage, empty, STAGES)
        if rest > 0:
            acc, stage, parity, zeroed_parity = _add_partial(
                acc, rest, stage, parity, zeroed_parity, full, empty, zeroed, a, b, PART, CONSUMERS, STAGES
            )
        row += PART * ROWS
        if row < K:
            slot = _write(acc.to(out_desc.dtype), out_desc, expert, row, col, buffers, slot, PART, BUFFERS)
        if DYNAMIC:
            expert, start, end, row, col, message_slot, message_parity = receive_tile(
                message_slot, message_parity, messages, sent, taken
            )
        else:
            expert, start, end, row, col = next_expert, next_start, next_end, next_row, next_col
    tma.store_wait(0)


@jit
def weights_kernel(
    x_desc: gl.tensor,
    grad_desc: gl.tensor,
    out_desc: gl.tensor,
    ends: gl.tensor,
    counter: gl.tensor,
    num_experts: gl.tensor,
    K: gl.tensor,
    N: gl.tensor,
    CONSUMERS: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_R: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr,
    DYNAMIC: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
) -> None:
    """out[e] = x[rows of e].T @ grad[rows of e], (E, K, N); zero for an expert without rows.

    A tile has CONSUMERS * ROWS rows and BLOCK_N columns, and is written in pieces of the columns of out's descriptor.

    Programs take every so many tiles, or, where DYNAMIC, draw them from `counter` (1,) int32, zero before and after;
    those of experts with many rows come first.
    """
    gl.static_assert(CONSUMERS <= 3 and STAGES >= 2)
    dtype: gl.constexpr = x_desc.dtype
    a = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS, BLOCK_R, ROWS], x_desc.layout)
    b = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_R, BLOCK_N], grad_desc.layout)
    buffers = gl.allocate_shared_memory(dtype, [CONSUMERS * BUFFERS] + out_desc.block_type.shape, out_desc.layout)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, CONSUMERS)
    zeroed = make_barriers(1, CONSUMERS)
    if DYNAMIC:
        messages = make_messages()
        sent = make_barriers(SLOTS, 1)
        taken = make_barriers(SLOTS, CONSUMERS)
    else:
        messages, sent, taken = zeroed, zeroed, zeroed
    fence_async_shared()
    sizes: gl.constexpr = (WIDTH, BUFFERS, CONSUMERS, ROWS, BLOCK_N, BLOCK_R, STAGES, GROUP_M, EXPERTS, DYNAMIC)
    load = (x_desc, grad_desc, ends, counter, num_experts, K, N, full, empty, messages, sent, taken, a, b)
    multiply = (out_desc, ends, num_experts, K, N, full, empty, zeroed, messages, sent, taken, a, b, buffers)
    if CONSUMERS == 1:
        gl.warp_specialize([(_multiply, (0,) + multiply + sizes), (_load, load + sizes)], [1], [PRODUCER_REGISTERS])
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [(_multiply, (0,) + multiply + sizes), (_multiply, (1,) + multiply + sizes), (_load, load + sizes)],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (0,) + multiply + sizes),
                (_multiply, (1,) + multiply + sizes),
                (_multiply, (2,) + multiply + sizes),
                (_load, load + sizes),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
