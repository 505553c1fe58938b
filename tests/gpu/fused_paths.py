"""The ways through the fused experts: what the host would choose, all in Triton, or Hopper's own kernels."""

from __future__ import annotations

from dataclasses import replace

from bexp.kernels.experts.fused.hopper.tiles import GATE_UP_GEMM, GRAD_HIDDEN, HopperRows
from bexp.kernels.experts.fused.tiles import ON_HOPPER, FusedTiles, default_tiles

PATHS = ("chosen", "triton", "hopper", "hopper, the other way to gather", "hopper, rows by expert")

ROWS_BY_EXPERT = ON_HOPPER.replaced(down_gemm=HopperRows(), grad_input=HopperRows())


def tiles_of(path: str) -> FusedTiles | None:
    """The tiles of one of `PATHS`; null for those that the host chooses."""
    gathered = replace(GRAD_HIDDEN, gathered=True)
    copied = replace(GATE_UP_GEMM, gathered=False)
    return {
        "chosen": None,
        "triton": default_tiles(1 << 20, 1 << 10, True, 2),
        "hopper": ON_HOPPER,
        "hopper, the other way to gather": ON_HOPPER.replaced(gate_up_gemm=copied, grad_hidden=gathered),
        "hopper, rows by expert": ROWS_BY_EXPERT,
    }[path]
