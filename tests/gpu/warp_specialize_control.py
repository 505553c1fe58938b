"""A kernel of two partitions that have no shared memory: what racecheck says of it is said of Triton. Imports Gluon."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from bexp.kernels.experts.hopper.pipeline import jit


@jit
def _write(out: gl.tensor, partition: gl.constexpr) -> None:
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    rows = partition * 128 + gl.arange(0, 128, layout=layout)
    gl.store(out + rows, rows)


@jit
def control_kernel(out: gl.tensor) -> None:
    """Each partition writes its half of the numbers from 0 to 255."""
    gl.warp_specialize([(_write, (out, 0)), (_write, (out, 1))], [4], [64])


def run() -> list[Tensor]:
    """Run it, and check what it wrote."""
    out = torch.full((256,), -1, dtype=torch.int32, device="cuda")
    control_kernel[(1,)](out, num_warps=4)
    assert torch.equal(out.cpu(), torch.arange(256, dtype=torch.int32))
    return [out]
