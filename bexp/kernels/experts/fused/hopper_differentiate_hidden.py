"""Backward through the second projection on Hopper, then through the activation and the routing weight.

Imports Triton's Gluon.
"""

# ruff: noqa: RUF005 - the language of the kernels has no unpacking
from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from bexp.kernels.experts.fused.elementwise import activation, activation_slope
from bexp.kernels.experts.fused.hopper_epilogue import BAND, HALVES, STRIP, await_sums, piece_of, release_sums
from bexp.kernels.experts.fused.hopper_main_loop import kernel, multiply, produce
from bexp.kernels.experts.hopper_grouped.pipeline import jit, make_barriers
from bexp.kernels.experts.hopper_grouped.schedule import find_rows_tile, row_tiles
from bexp.kernels.gluon_names import reinterpret, thread_barrier

AHEAD = gl.constexpr(2)


@jit
def _copy_pre(
    pre_desc: gl.tensor,
    row: gl.tensor,
    col: gl.tensor,
    bands: gl.tensor,
    strips: gl.tensor,
    piece: gl.tensor,
    H: gl.tensor,
    buffers: gl.tensor,
    arrived: gl.tensor,
    turn: gl.tensor,
    GATES: gl.constexpr,
) -> None:
    """Start the copy of gate and up of a tile's piece into the buffers whose turn it is, if the tile has so many."""
    slot = turn % AHEAD
    exists = piece < bands * strips
    row += piece // strips * BAND
    col += piece % strips * STRIP
    mbarrier.expect(arrived.index(slot), GATES * BAND * STRIP * 2, pred=exists)
    for gate in gl.static_range(GATES):
        tma.async_copy_global_to_shared(
            pre_desc, [row, gate * H + col], arrived.index(slot), buffers.index(slot * GATES + gate), pred=exists
        )


@jit
def _epilogue(
    pre_desc: gl.tensor,
    grad_pre: gl.tensor,
    hidden: gl.tensor,
    weights: gl.tensor,
    partial: gl.tensor,
    pair_of_row: gl.tensor,
    ends: gl.tensor,
    num_experts: gl.tensor,
    num_rows: gl.tensor,
    H: gl.tensor,
    filled: gl.tensor,
    free: gl.tensor,
    arrived: gl.tensor,
    pieces: gl.tensor,
    buffers: gl.tensor,
    ACTIVATION: gl.constexpr,
    GATES: gl.constexpr,
    COLUMNS: gl.constexpr,
    CONSUMERS: gl.constexpr,
    ROWS: gl.constexpr,
    GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr,
) -> None:
    """The epilogue: the next AHEAD pieces of `pre` are on their way while one is worked on."""
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    STRIPS: gl.constexpr = COLUMNS // STRIP
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    end_E, tiles_E, tiles_n, num_tiles = row_tiles(ends, num_experts, H, BLOCK_M, COLUMNS, EXPERTS)
    parity = 0
    turn = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        _expert, row, end, col = find_rows_tile(tile, end_E, tiles_E, tiles_n, BLOCK_M, COLUMNS, GROUP_M)
        bands = gl.minimum(gl.cdiv(end - row, BAND), BLOCK_M // BAND)
        strips = gl.minimum(gl.cdiv(H - col, STRIP), STRIPS)
        for ahead in gl.static_range(AHEAD):
            _copy_pre(pre_desc, row, col, bands, strips, ahead, H, buffers, arrived, turn + ahead, GATES)
        for band in range(bands):
            rows = row + band * BAND + gl.arange(0, BAND, gl.SliceLayout(1, layout))
            live = rows < end
            pairs = gl.load(pair_of_row + rows, mask=live, other=0)
            weight = gl.load(weights + pairs, mask=live, other=0.0).to(gl.float32)[:, None]
            total = gl.zeros([BAND], gl.float32, gl.SliceLayout(1, layout))
            rows = rows.to(gl.int64)[:, None]
            await_sums(filled, band * BAND // ROWS, parity)
            for strip in range(strips):
                columns = col + strip * STRIP + gl.arange(0, STRIP, gl.SliceLayout(0, layout))
                written = live[:, None] & (columns < H)[None, :]
                cells = grad_pre + rows * (GATES * H) + columns[None, :]
                slot = turn % AHEAD
                mbarrier.wait(arrived.index(slot), turn // AHEAD % 2)
                gate = buffers.index(slot * GATES).load(layout)
                if GATES == 2:
                    up = buffers.index(slot * GATES + 1).load(layout)
                thread_barrier()
                following = band * strips + strip + AHEAD
                _copy_pre(pre_desc, row, col, bands, strips, following, H, buffers, arrived, turn + AHEAD, GATES)
                grad = piece_of(pieces, band, strip, ROWS, STRIPS).load(layout).to(gl.float32)
                product = activation(gate.to(gl.float32), ACTIVATION)
                slope = activation_slope(gate.to(gl.float32), ACTIVATION)
                weighted = grad * weight
                if GATES == 2:
                    gl.store(cells + H, (weighted * product).to(gate.dtype), mask=written)
                    weighted *= up.to(gl.float32)
                    product *= up.to(gl.float32)
                gl.store(cells, (weighted * slope).to(gate.dtype), mask=written)
                gl.store(hidden + rows * H + columns[None, :], (product * weight).to(gate.dtype), mask=written)
                total += gl.sum(gl.where(written, grad * product, 0.0), axis=1)
                turn += 1
            gl.store(partial + (col // COLUMNS).to(gl.int64) * num_rows + pairs, total, mask=live)
            if band % (ROWS // BAND) == ROWS // BAND - 1:
                release_sums(free, band * BAND // ROWS)
        for part in range(bands * BAND // ROWS, CONSUMERS):
            await_sums(filled, part, parity)
            release_sums(free, part)
        parity = parity ^ 1


@kernel
def differentiate_hidden_kernel(
    grad: gl.tensor,
    w_desc: gl.tensor,
    pre_desc: gl.tensor,
    grad_pre: gl.tensor,
    hidden: gl.tensor,
    weights: gl.tensor,
    partial: gl.tensor,
    token_of_row: gl.tensor,
    pair_of_row: gl.tensor,
    ends: gl.tensor,
    num_experts: gl.tensor,
    num_rows: gl.tensor,
    eighth_of_K: gl.tensor,
    eighth_of_H: gl.tensor,
    ACTIVATION: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    GATHERED: gl.constexpr,
    EVEN_K: gl.constexpr,
    GATES: gl.constexpr,
    COLUMNS: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr,
    A_LAYOUT: gl.constexpr,
    B_LAYOUT: gl.constexpr,
    SUMS_LAYOUT: gl.constexpr,
    EPILOGUE_WARPS: gl.constexpr,
    PRODUCER_WARPS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    OTHER_REGISTERS: gl.constexpr,
) -> None:
    """As the Triton kernel of that name, with `partial` (H / COLUMNS, R).

    grad is what `produce` calls x; w_desc is over w_out (E, 1, H, K), or over (E, K, 1, H) unless TRANSPOSED; pre_desc
    is over (R, GATES * H).
    """
    CONSUMERS: gl.constexpr = 2
    SUMMED: gl.constexpr = 1
    K = eighth_of_K * 8
    H = eighth_of_H * 8
    dtype: gl.constexpr = w_desc.dtype
    rows = gl.allocate_shared_memory(dtype, [STAGES, CONSUMERS * ROWS, BLOCK_K], A_LAYOUT)
    parts = gl.allocate_shared_memory(dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    sums = gl.allocate_shared_memory(dtype, [CONSUMERS * HALVES, ROWS, COLUMNS // HALVES], SUMS_LAYOUT)
    a = reinterpret(rows, dtype, [STAGES * CONSUMERS, ROWS, BLOCK_K], A_LAYOUT)
    if TRANSPOSED:
        b = reinterpret(parts, dtype, [STAGES, COLUMNS, BLOCK_K], A_LAYOUT)
        b_halves = reinterpret(parts, dtype, [STAGES * HALVES, COLUMNS // HALVES, BLOCK_K], A_LAYOUT)
    else:
        b = reinterpret(parts, dtype, [STAGES, BLOCK_K, COLUMNS], B_LAYOUT)
        b_halves = reinterpret(parts, dtype, [STAGES * HALVES, BLOCK_K, COLUMNS // HALVES], B_LAYOUT)
    pieces = reinterpret(sums, dtype, [CONSUMERS * ROWS // BAND * COLUMNS // STRIP, BAND, STRIP], SUMS_LAYOUT)
    buffers = gl.allocate_shared_memory(dtype, [AHEAD * GATES, BAND, STRIP], pre_desc.layout)
    arrived = make_barriers(AHEAD, 1)
    full = make_barriers(STAGES, 2 if GATHERED else 1)
    empty = make_barriers(STAGES, CONSUMERS)
    filled = make_barriers(CONSUMERS * HALVES, 1)
    free = make_barriers(CONSUMERS * HALVES, 1)
    fence_async_shared()
    scheduling: gl.constexpr = (GROUP_M, EXPERTS)
    products: gl.constexpr = (TRANSPOSED, SUMMED, COLUMNS, WIDTH, CONSUMERS, STAGES) + scheduling
    producing: gl.constexpr = (GATHERED, EVEN_K, TRANSPOSED, SUMMED, COLUMNS, STAGES) + scheduling
    epilogue_sizes: gl.constexpr = (ACTIVATION, GATES, COLUMNS, CONSUMERS, ROWS) + scheduling
    multiplied = (ends, num_experts, K, H, full, empty, filled, free, a, b, b_halves, sums)
    epilogue_arguments = (pre_desc, grad_pre, hidden, weights, partial, pair_of_row, ends, num_experts, num_rows, H)
    passed = (filled, free, arrived, pieces, buffers)
    loaded = (grad, token_of_row, w_desc, ends, num_experts, num_rows, K, H, full, empty, rows, parts)
    gl.warp_specialize(
        [
            (multiply, (0,) + multiplied + products),
            (multiply, (1,) + multiplied + products),
            (_epilogue, epilogue_arguments + passed + epilogue_sizes),
            (produce, loaded + producing),
        ],
        [4, EPILOGUE_WARPS, PRODUCER_WARPS],
        [CONSUMER_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS],
    )
