"""The tiles of the Triton grouped GEMM against each other, product by product."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gemm_contenders import Problem
from workers.kernels.experts.triton_gemm import LARGE, LOW, SHALLOW, SQUARE, Tiles, multiply_rows, sum_over_rows
from workers.kernels.experts.triton_support import triton_failure
from workers.profiler.cuda_timing import CudaTimer

TOLERANCE = 1e-2

ROWS_TILES: dict[str, Tiles] = {
    "large": LARGE,
    "large, strips of 16": replace(LARGE, group_m=16),
    "large, pointers": replace(LARGE, bulk_copies=False),
    "large, halves": replace(LARGE, num_stages=4, halves=True),
    "large, flat": replace(LARGE, num_stages=4, flatten=True),
    "large, flat, 3 stages": replace(LARGE, flatten=True),
    "square, flat": replace(SQUARE, flatten=True),
    "low, flat": replace(LOW, flatten=True),
    "tall 256x128": Tiles(256, 128, 64, num_stages=3, num_warps=8),
    "square": SQUARE,
    "square, 3 stages": replace(SQUARE, num_stages=3),
    "square, pointers": replace(SQUARE, bulk_copies=False),
    "square, 4 warps, two a multiprocessor": Tiles(128, 128, 32, 4, 4, programs_per_multiprocessor=2),
    "low": LOW,
    "low, pointers": replace(LOW, bulk_copies=False),
    "low, deep steps": Tiles(64, 128, 128, num_stages=3, num_warps=4),
    "low and wide": Tiles(64, 256, 64, num_stages=4, num_warps=4),
}
WEIGHTS_TILES: dict[str, Tiles] = {
    "large": LARGE,
    "large, strips of 16": replace(LARGE, group_m=16),
    "large, pointers": replace(LARGE, bulk_copies=False),
    "large, halves": replace(LARGE, num_stages=4, halves=True),
    "tall 256x128": Tiles(256, 128, 64, num_stages=3, num_warps=8),
    "square": SQUARE,
    "square, two a multiprocessor": Tiles(128, 128, 64, 2, 8, programs_per_multiprocessor=2),
    "shallow": SHALLOW,
    "shallow, pointers": replace(SHALLOW, bulk_copies=False),
    "shallow, steps of 16": Tiles(128, 128, 16, num_stages=3, num_warps=4, programs_per_multiprocessor=3),
    "shallow, three a multiprocessor": Tiles(128, 64, 32, 3, 4, programs_per_multiprocessor=3),
}


class _OnePass:
    training = False
    is_chainable = False

    def __init__(self, run: Callable[[], Tensor]) -> None:
        self.run = run

    def prepare_forward(self) -> None:
        pass

    def forward(self) -> None:
        self.run()

    def prepare_backward(self) -> None:
        pass

    def backward(self) -> None:
        pass

    def run_chain(self, length: int) -> None:
        raise AssertionError(length)


def compare_tiles(given: Problem, timer: CudaTimer, deadline: float) -> list[dict[str, Any]]:
    """Seconds of forward, dX and dW with every choice of tiles, and how far each is from torch's result."""
    x, w, grad, ends = given.x, given.w, given.grad, given.ends
    products: list[tuple[str, dict[str, Tiles], Tensor, Callable[[Tensor, Tiles], Tensor]]] = [
        (
            "forward",
            ROWS_TILES,
            F.grouped_mm(x, w, offs=ends),
            lambda out, tiles: multiply_rows(x, w, ends, out=out, tiles=tiles),
        ),
        (
            "dX",
            ROWS_TILES,
            F.grouped_mm(grad, w.transpose(1, 2), offs=ends),
            lambda out, tiles: multiply_rows(grad, w, ends, transposed=True, out=out, tiles=tiles),
        ),
        (
            "dW",
            WEIGHTS_TILES,
            F.grouped_mm(x.t(), grad, offs=ends),
            lambda out, tiles: sum_over_rows(x, grad, ends, out=out, tiles=tiles),
        ),
    ]
    rows: list[dict[str, Any]] = []
    for product, choices, wanted, run in products:
        for name, tiles in choices.items():
            if time.monotonic() > deadline:
                return rows
            row = {"product": product, "tiles": name, **asdict(tiles)}
            rows.append(row | _compare(run, tiles, wanted, timer))
    return rows


def _compare(run: Callable[[Tensor, Tiles], Tensor], tiles: Tiles, wanted: Tensor, timer: CudaTimer) -> dict[str, Any]:
    out = torch.full_like(wanted, float("nan"))

    def differentiable() -> Tensor:
        return run(out, tiles).flatten()[0].detach().requires_grad_()

    reason = triton_failure(differentiable, wanted.device)
    if reason is not None:
        return {"reason": reason}
    difference = float(torch.linalg.vector_norm(out - wanted, dtype=torch.float32))
    difference /= float(torch.linalg.vector_norm(wanted, dtype=torch.float32))
    if not difference <= TOLERANCE:
        return {"reason": f"wrong by {difference:.1e}"}
    passes = _OnePass(lambda: run(out, tiles))
    timer.warm_up(passes)
    return {"seconds": timer.time(passes).device_seconds, "difference": difference}
