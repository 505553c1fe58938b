"""The ways through the fused experts: what the host would choose, all in Triton, or Hopper's own kernels."""

from __future__ import annotations

from dataclasses import replace

from bexp.kernels.experts.fused.hopper_tiles import GATE_UP_GEMM, GRAD_HIDDEN
from bexp.kernels.experts.fused.tiles import FusedTiles, default_tiles, on_hopper_tiles

PATHS = ("chosen", "triton", "hopper", "hopper, the other way to gather", "hopper, rows by token")

_TOKENS, _EXPERTS = 1 << 20, 1 << 8
_SIZES = (_EXPERTS, True, 2)
_IN_TRITON = default_tiles(_TOKENS, 2, *_SIZES)
ON_HOPPER = on_hopper_tiles(_IN_TRITON)
ROWS_BY_TOKEN = on_hopper_tiles(_IN_TRITON, products=False)


def tiles_of(path: str) -> FusedTiles | None:
    """The tiles of one of `PATHS`; null for those that the host chooses."""
    gathered = replace(GRAD_HIDDEN, gathered=True)
    copied = replace(GATE_UP_GEMM, gathered=False)
    return {
        "chosen": None,
        "triton": _IN_TRITON,
        "hopper": ON_HOPPER,
        "hopper, the other way to gather": ROWS_BY_TOKEN.replaced(gate_up_gemm=copied, grad_hidden=gathered),
        "hopper, rows by token": ROWS_BY_TOKEN,
    }[path]
