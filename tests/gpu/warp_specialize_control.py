"""A kernel whose partitions have no shared memory: what racecheck says of it is said of Triton. Imports Gluon.

The partitions have the warps that those of our kernels have: one worker of one warp, or one of four and one of one. A
worker of four warps alone stands beside them, because Triton adds warps to the other two, up to a multiple of four.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from bexp.kernels.experts.hopper.pipeline import jit

PARTITIONS = {4: 2, 1: 2, 5: 3}
"""The number of partitions, by the warps of the workers together."""
_ROUNDS, _PROGRAMS = 256, 32


@jit
def _write(
    out: gl.tensor, rounds: gl.tensor, PARTITION: gl.constexpr, NUM_PARTITIONS: gl.constexpr, WARPS: gl.constexpr
) -> None:
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    for each in range(gl.program_id(0), rounds, gl.num_programs(0)):
        rows = (each * NUM_PARTITIONS + PARTITION) * 128 + gl.arange(0, 128, layout=layout)
        gl.store(out + rows, rows)


@jit
def control_kernel(out: gl.tensor, rounds: gl.tensor, WORKERS: gl.constexpr) -> None:
    """Each partition writes its rows of 128 numbers: the numbers from 0 on, all together."""
    if WORKERS == 1:
        gl.warp_specialize([(_write, (out, rounds, 0, 2, 4)), (_write, (out, rounds, 1, 2, 1))], [1], [64])
    elif WORKERS == 4:
        gl.warp_specialize([(_write, (out, rounds, 0, 2, 4)), (_write, (out, rounds, 1, 2, 4))], [4], [64])
    elif WORKERS == 5:
        gl.warp_specialize(
            [(_write, (out, rounds, 0, 3, 4)), (_write, (out, rounds, 1, 3, 4)), (_write, (out, rounds, 2, 3, 1))],
            [4, 1],
            [64, 64],
        )


def run() -> list[Tensor]:
    """Run it with each kind of workers, and check what it wrote."""
    return [_run(workers, partitions) for workers, partitions in PARTITIONS.items()]


def _run(workers: int, partitions: int) -> Tensor:
    out = torch.full((_ROUNDS * partitions * 128,), -1, dtype=torch.int32, device="cuda")
    control_kernel[(_PROGRAMS,)](out, _ROUNDS, workers, num_warps=4)
    assert torch.equal(out.cpu(), torch.arange(len(out), dtype=torch.int32))
    return out
