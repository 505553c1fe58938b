"""Dynamic scheduling: programs claim tiles when they become free, and producers tell consumers. Imports Gluon.

A program's first tile is its own number. For each tile that it begins, its producer claims its next one by adding one
to a counter in global memory. One claim is made for each tile, so that the counter ends at the number of tiles. The
producer that makes the last claim knows that nobody will claim again, and sets the counter to zero for the next launch.

The consumers read each tile from a few messages in shared memory, used in turn, with barriers as the operands have.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from bexp.kernels.experts.hopper_grouped.pipeline import jit, next_stage
from bexp.kernels.gluon_names import thread_barrier

SLOTS: gl.constexpr = gl.constexpr(4)
_FIELDS: gl.constexpr = gl.constexpr(8)


@jit
def make_messages() -> gl.tensor:
    """Room for SLOTS messages."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.int32, [SLOTS, _FIELDS], layout)


@jit
def claim_tile(counter: gl.tensor) -> gl.tensor:
    """Claim the next tile without waiting for the answer: a tensor of one warp for `claimed_tile`."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    lanes = gl.arange(0, 32, layout)
    return gl.atomic_add(counter + lanes, gl.full_like(lanes, 1), mask=lanes == 0, sem="relaxed")


@jit
def claimed_tile(claim: gl.tensor) -> gl.tensor:
    """The number that was claimed, once it is there."""
    layout: gl.constexpr = claim.type.layout
    return gl.sum(gl.where(gl.arange(0, 32, layout) == 0, claim, 0), 0)


@jit
def send_tile(
    expert: gl.tensor,
    start: gl.tensor,
    end: gl.tensor,
    row: gl.tensor,
    col: gl.tensor,
    slot: gl.tensor,
    parity: gl.tensor,
    messages: gl.tensor,
    sent: gl.tensor,
    taken: gl.tensor,
) -> tuple[gl.tensor, gl.tensor]:
    """The producer's part: a tile for all consumers; the next slot and parity."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    field = gl.arange(0, _FIELDS, layout)
    message = gl.where(field == 0, expert, gl.where(field == 1, start, end))
    message = gl.where(field <= 2, message, gl.where(field == 3, row, col))
    mbarrier.wait(taken.index(slot), parity)
    messages.index(slot).store(message)
    thread_barrier()
    mbarrier.arrive(sent.index(slot))
    slot, parity = next_stage(slot, parity, SLOTS)
    return slot, parity


@jit
def receive_tile(
    slot: gl.tensor, parity: gl.tensor, messages: gl.tensor, sent: gl.tensor, taken: gl.tensor
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """A consumer's part: expert, its first row and end, row and column of the next tile; the next slot and parity."""
    layout: gl.constexpr = gl.BlockedLayout([_FIELDS], [32], [gl.num_warps()], [0])
    mbarrier.wait(sent.index(slot), parity)
    message = messages.index(slot).load(layout)
    thread_barrier()
    mbarrier.arrive(taken.index(slot))
    expert = _field(message, 0)
    start = _field(message, 1)
    end = _field(message, 2)
    row = _field(message, 3)
    col = _field(message, 4)
    slot, parity = next_stage(slot, parity, SLOTS)
    return expert, start, end, row, col, slot, parity


@jit
def _field(message: gl.tensor, FIELD: gl.constexpr) -> gl.tensor:
    layout: gl.constexpr = message.type.layout
    return gl.sum(gl.where(gl.arange(0, _FIELDS, layout) == FIELD, message, 0), 0)
