"""Passes sums of products from the warpgroups that multiply to the epilogue. Imports Triton's Gluon.

Each consumer has two buffers, one for each half of its columns. `filled[buffer]` completes when the sums are written,
`free[buffer]` when the epilogue has read them. Every barrier completes once per tile, even if there is nothing to pass,
so that all have the same parity. The consumers wait for the parity of the tile before, which a new barrier counts as
complete.

The epilogue reads pieces of BAND rows and STRIP columns, that is one swizzled block of shared memory, by `piece_of`.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from bexp.kernels.experts.hopper_grouped.pipeline import halves, jit
from bexp.kernels.gluon_names import thread_barrier

BAND = gl.constexpr(32)
STRIP = gl.constexpr(64)
HALVES = gl.constexpr(2)


@jit
def pass_on(
    acc: gl.tensor, sums: gl.tensor, filled: gl.tensor, free: gl.tensor, PART: gl.constexpr, parity: gl.tensor
) -> None:
    """A consumer's sums of all columns."""
    left, right = halves(acc.to(sums.dtype))
    _pass_half(left, sums, filled, free, PART * HALVES, parity)
    _pass_half(right, sums, filled, free, PART * HALVES + 1, parity)


@jit
def pass_on_left(
    acc: gl.tensor, sums: gl.tensor, filled: gl.tensor, free: gl.tensor, PART: gl.constexpr, parity: gl.tensor
) -> None:
    """A consumer's sums of the left half of the columns, and nothing for the right."""
    _pass_half(acc.to(sums.dtype), sums, filled, free, PART * HALVES, parity)
    _pass_nothing(filled, free, PART * HALVES + 1, parity)


@jit
def pass_nothing_on(filled: gl.tensor, free: gl.tensor, PART: gl.constexpr, parity: gl.tensor) -> None:
    """For a consumer whose rows are another expert's."""
    _pass_nothing(filled, free, PART * HALVES, parity)
    _pass_nothing(filled, free, PART * HALVES + 1, parity)


@jit
def _pass_half(
    half: gl.tensor, sums: gl.tensor, filled: gl.tensor, free: gl.tensor, at: gl.tensor, parity: gl.tensor
) -> None:
    mbarrier.wait(free.index(at), parity ^ 1)
    sums.index(at).store(half)
    thread_barrier()
    mbarrier.arrive(filled.index(at))


@jit
def _pass_nothing(filled: gl.tensor, free: gl.tensor, at: gl.tensor, parity: gl.tensor) -> None:
    mbarrier.wait(free.index(at), parity ^ 1)
    mbarrier.arrive(filled.index(at))


@jit
def await_sums(filled: gl.tensor, part: gl.tensor, parity: gl.tensor) -> None:
    """Wait until both halves of a consumer's sums are written."""
    mbarrier.wait(filled.index(part * HALVES), parity)
    mbarrier.wait(filled.index(part * HALVES + 1), parity)


@jit
def release_sums(free: gl.tensor, part: gl.tensor) -> None:
    """Signal that the epilogue has read what it needs of a consumer's sums."""
    thread_barrier()
    mbarrier.arrive(free.index(part * HALVES))
    mbarrier.arrive(free.index(part * HALVES + 1))


@jit
def piece_of(
    pieces: gl.tensor, band: gl.tensor, strip: gl.tensor, ROWS: gl.constexpr, STRIPS: gl.constexpr
) -> gl.tensor:
    """The sums of a band of a tile's rows and a strip of its columns, where a consumer has ROWS and all STRIPS."""
    BANDS: gl.constexpr = ROWS // BAND
    return pieces.index((band // BANDS * STRIPS + strip) * BANDS + band % BANDS)
