"""The first projection on Hopper: tokens by their expert's gate and up matrices, then the activation.

Imports Triton's Gluon.
"""

# ruff: noqa: RUF005 - the language of the kernels has no unpacking
from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from bexp.kernels.experts.fused.elementwise import activation
from bexp.kernels.experts.fused.hopper_epilogue import BAND, HALVES, STRIP, await_sums, piece_of, release_sums
from bexp.kernels.experts.fused.hopper_main_loop import kernel, multiply, produce
from bexp.kernels.experts.hopper_grouped.pipeline import jit, make_barriers
from bexp.kernels.experts.hopper_grouped.schedule import find_rows_tile, row_tiles
from bexp.kernels.gluon_names import reinterpret


@jit
def _epilogue(
    pre: gl.tensor,
    hidden: gl.tensor,
    weights: gl.tensor,
    pair_of_row: gl.tensor,
    ends: gl.tensor,
    num_experts: gl.tensor,
    H: gl.tensor,
    filled: gl.tensor,
    free: gl.tensor,
    pieces: gl.tensor,
    ACTIVATION: gl.constexpr,
    KEEP: gl.constexpr,
    GATES: gl.constexpr,
    COLUMNS: gl.constexpr,
    CONSUMERS: gl.constexpr,
    ROWS: gl.constexpr,
    GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr,
) -> None:
    """The epilogue."""
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    STRIPS: gl.constexpr = GATES * COLUMNS // STRIP
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    end_E, tiles_E, tiles_n, num_tiles = row_tiles(ends, num_experts, H, BLOCK_M, COLUMNS, EXPERTS)
    parity = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        _expert, row, end, col = find_rows_tile(tile, end_E, tiles_E, tiles_n, BLOCK_M, COLUMNS, GROUP_M)
        bands = gl.minimum(gl.cdiv(end - row, BAND), BLOCK_M // BAND)
        strips = gl.minimum(gl.cdiv(H - col, STRIP), COLUMNS // STRIP)
        for band in range(bands):
            rows = row + band * BAND + gl.arange(0, BAND, gl.SliceLayout(1, layout))
            live = rows < end
            pairs = gl.load(pair_of_row + rows, mask=live, other=0)
            weight = gl.load(weights + pairs, mask=live, other=0.0).to(gl.float32)
            rows = rows.to(gl.int64)[:, None]
            await_sums(filled, band * BAND // ROWS, parity)
            for strip in range(strips):
                columns = col + strip * STRIP + gl.arange(0, STRIP, gl.SliceLayout(0, layout))
                written = live[:, None] & (columns < H)[None, :]
                gate = piece_of(pieces, band, strip, ROWS, STRIPS).load(layout)
                out = activation(gate.to(gl.float32), ACTIVATION) * weight[:, None]
                if KEEP:
                    gl.store(pre + rows * (GATES * H) + columns[None, :], gate, mask=written)
                if GATES == 2:
                    up = piece_of(pieces, band, STRIPS // 2 + strip, ROWS, STRIPS).load(layout)
                    out *= up.to(gl.float32)
                    if KEEP:
                        gl.store(pre + rows * (GATES * H) + H + columns[None, :], up, mask=written)
                gl.store(hidden + rows * H + columns[None, :], out.to(gate.dtype), mask=written)
            if band % (ROWS // BAND) == ROWS // BAND - 1:
                release_sums(free, band * BAND // ROWS)
        for part in range(bands * BAND // ROWS, CONSUMERS):
            await_sums(filled, part, parity)
            release_sums(free, part)
        parity = parity ^ 1


@kernel
def gate_up_gemm_kernel(
    x: gl.tensor,
    w_desc: gl.tensor,
    pre: gl.tensor,
    hidden: gl.tensor,
    weights: gl.tensor,
    token_of_row: gl.tensor,
    pair_of_row: gl.tensor,
    ends: gl.tensor,
    num_experts: gl.tensor,
    num_rows: gl.tensor,
    eighth_of_K: gl.tensor,
    eighth_of_H: gl.tensor,
    ACTIVATION: gl.constexpr,
    KEEP: gl.constexpr,
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
    """hidden[r] = weight[r] act(x[r] w_gate) * (x[r] w_up), and with KEEP both products to `pre` (R, 2H), or (R, H).

    x and w_desc as in `produce`, with N = H. The activation is taken of the products rounded, as in backward.
    """
    CONSUMERS: gl.constexpr = 2
    BLOCK_N: gl.constexpr = GATES * COLUMNS
    K = eighth_of_K * 8
    H = eighth_of_H * 8
    dtype: gl.constexpr = w_desc.dtype
    rows = gl.allocate_shared_memory(dtype, [STAGES, CONSUMERS * ROWS, BLOCK_K], A_LAYOUT)
    parts = gl.allocate_shared_memory(dtype, [STAGES * GATES] + w_desc.block_type.shape, w_desc.layout)
    sums = gl.allocate_shared_memory(dtype, [CONSUMERS * HALVES, ROWS, BLOCK_N // HALVES], SUMS_LAYOUT)
    a = reinterpret(rows, dtype, [STAGES * CONSUMERS, ROWS, BLOCK_K], A_LAYOUT)
    if TRANSPOSED:
        b = reinterpret(parts, dtype, [STAGES, BLOCK_N, BLOCK_K], A_LAYOUT)
        b_halves = reinterpret(parts, dtype, [STAGES * HALVES, BLOCK_N // HALVES, BLOCK_K], A_LAYOUT)
    else:
        b = reinterpret(parts, dtype, [STAGES, BLOCK_K, BLOCK_N], B_LAYOUT)
        b_halves = reinterpret(parts, dtype, [STAGES * HALVES, BLOCK_K, BLOCK_N // HALVES], B_LAYOUT)
    pieces = reinterpret(sums, dtype, [CONSUMERS * ROWS // BAND * BLOCK_N // STRIP, BAND, STRIP], SUMS_LAYOUT)
    full = make_barriers(STAGES, 2 if GATHERED else 1)
    empty = make_barriers(STAGES, CONSUMERS)
    filled = make_barriers(CONSUMERS * HALVES, 1)
    free = make_barriers(CONSUMERS * HALVES, 1)
    fence_async_shared()
    scheduling: gl.constexpr = (GROUP_M, EXPERTS)
    products: gl.constexpr = (TRANSPOSED, GATES, COLUMNS, WIDTH, CONSUMERS, STAGES) + scheduling
    producing: gl.constexpr = (GATHERED, EVEN_K, TRANSPOSED, GATES, COLUMNS, STAGES) + scheduling
    epilogue_sizes: gl.constexpr = (ACTIVATION, KEEP, GATES, COLUMNS, CONSUMERS, ROWS) + scheduling
    multiplied = (ends, num_experts, K, H, full, empty, filled, free, a, b, b_halves, sums)
    epilogue_arguments = (pre, hidden, weights, pair_of_row, ends, num_experts, H, filled, free, pieces)
    loaded = (x, token_of_row, w_desc, ends, num_experts, num_rows, K, H, full, empty, rows, parts)
    gl.warp_specialize(
        [
            (multiply, (0,) + multiplied + products),
            (multiply, (1,) + multiplied + products),
            (_epilogue, epilogue_arguments + epilogue_sizes),
            (produce, loaded + producing),
        ],
        [4, EPILOGUE_WARPS, PRODUCER_WARPS],
        [CONSUMER_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS],
    )
