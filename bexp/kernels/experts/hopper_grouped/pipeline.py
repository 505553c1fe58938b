"""The common parts of the Hopper kernels: operand stages, main loop, and stores. Imports Triton's Gluon.

A program is one producer warp and one to three consumer warpgroups. The producer copies operand blocks into stages by
the tensor memory accelerator, and runs ahead across the ends of tiles. Each consumer multiplies its own rows of the
tile by columns that all share. `full[stage]` completes when a stage's bytes have arrived, `empty[stage]` when every
consumer has read it. The consumers synchronise through the stages alone, so that one can write its part of a tile while
another still multiplies.

A stage is used once per round. The producer waits for the parity of the previous round, which a new barrier counts as
complete. The consumers wait for the parity of the current round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from bexp.kernels.gluon_names import thread_barrier

jit: Callable[[Callable[..., Any]], Any] = gluon.jit


@jit
def make_barriers(STAGES: gl.constexpr, ARRIVALS: gl.constexpr) -> gl.tensor:
    """One barrier a stage, each completed by ARRIVALS arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(barriers.index(stage), count=ARRIVALS)
    return barriers


@jit
def next_stage(stage: gl.tensor, parity: gl.tensor, STAGES: gl.constexpr) -> gl.tensor:
    """The stage after, and the parity of its round."""
    wraps = stage == STAGES - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, parity ^ 1, parity)


@jit
def stage_before(stage: gl.tensor, STAGES: gl.constexpr) -> gl.tensor:
    """The stage that was read before this one.

    Computed, not remembered: Triton 3.6 takes a variable that a loop sets to another's old value for a constant.
    """
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@jit
def operand(block: gl.tensor, ROWS: gl.constexpr, COLUMNS: gl.constexpr, TRANSPOSED: gl.constexpr) -> gl.tensor:
    """A stage's block as a matrix (ROWS, COLUMNS), or as its transpose."""
    matrix = block.reshape([ROWS, COLUMNS])
    if TRANSPOSED:
        matrix = matrix.permute((1, 0))
    return matrix


@jit
def accumulator(ROWS: gl.constexpr, COLUMNS: gl.constexpr, WIDTH: gl.constexpr) -> gl.tensor:
    """Zeros in the registers of one warpgroup, to be multiplied WIDTH columns an instruction."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, WIDTH, 16])
    return gl.zeros([ROWS, COLUMNS], gl.float32, layout)


@jit
def start_products(
    acc: gl.tensor,
    steps: gl.tensor,
    stage: gl.tensor,
    parity: gl.tensor,
    full: gl.tensor,
    empty: gl.tensor,
    a: gl.tensor,
    b: gl.tensor,
    PART: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    A_TRANSPOSED: gl.constexpr,
    B_TRANSPOSED: gl.constexpr,
    B_BLOCKS: gl.constexpr = 1,
) -> gl.tensor:
    """Start the sum of `steps` products of the stages from `stage` on; `finish_products` waits for the last.

    Returns the sum, and the stage and parity after it.

    `a` (STAGES * CONSUMERS, rows, columns) holds a block for each consumer, `b` (STAGES * B_BLOCKS, ..., rows,
    columns) one for all of them: the first of a stage's B_BLOCKS.
    """
    for step in range(steps):
        mbarrier.wait(full.index(stage), parity)
        a_block = operand(a.index(stage * CONSUMERS + PART), a.shape[1], a.shape[2], A_TRANSPOSED)
        b_block = operand(b.index(stage * B_BLOCKS), b.shape[-2], b.shape[-1], B_TRANSPOSED)
        acc = warpgroup_mma(a_block, b_block, acc, use_acc=step > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index(stage_before(stage, STAGES)), pred=step > 0)
        stage, parity = next_stage(stage, parity, STAGES)
    return acc, stage, parity


@jit
def finish_products(
    acc: gl.tensor, steps: gl.tensor, stage: gl.tensor, empty: gl.tensor, STAGES: gl.constexpr
) -> gl.tensor:
    """The sum that `start_products` began; zeros for no step. Frees the last stage, the one before `stage`."""
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index(stage_before(stage, STAGES)), pred=steps > 0)
    return acc


@jit
def sum_products(
    steps: gl.tensor,
    stage: gl.tensor,
    parity: gl.tensor,
    full: gl.tensor,
    empty: gl.tensor,
    a: gl.tensor,
    b: gl.tensor,
    PART: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    WIDTH: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    B_TRANSPOSED: gl.constexpr,
    B_BLOCKS: gl.constexpr = 1,
) -> gl.tensor:
    """The main loop of a tile: the sum (ROWS, COLUMNS) of `steps` products, and the stage and parity after it.

    The stages are as `start_products` describes them.
    """
    acc, stage, parity = start_products(
        accumulator(ROWS, COLUMNS, WIDTH),
        steps,
        stage,
        parity,
        full,
        empty,
        a,
        b,
        PART,
        CONSUMERS,
        STAGES,
        False,
        B_TRANSPOSED,
        B_BLOCKS,
    )
    acc = finish_products(acc, steps, stage, empty, STAGES)
    return acc, stage, parity


@jit
def halves(x: gl.tensor) -> gl.tensor:
    """The left and the right half of the columns."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@jit
def free_buffer(buffers: gl.tensor, slot: gl.tensor, PART: gl.constexpr, BUFFERS: gl.constexpr) -> gl.tensor:
    """The buffer `slot` of the BUFFERS of consumer PART, once what was written from it is on its way.

    A buffer's turn comes only after every other's, so that with one copy fewer under way than buffers it is free.
    """
    tma.store_wait(BUFFERS - 1)
    thread_barrier()
    return buffers.index(PART * BUFFERS + slot)


@jit
def next_slot(slot: gl.tensor, BUFFERS: gl.constexpr) -> gl.tensor:
    """Whose turn it is after a bulk copy was started from `slot`."""
    return gl.where(slot == BUFFERS - 1, 0, slot + 1)


@jit
def make_visible() -> None:
    """Make this warpgroup's writes to shared memory visible to bulk copies and products from here on."""
    fence_async_shared()
    thread_barrier()
