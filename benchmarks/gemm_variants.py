"""The tiles of the grouped GEMMs in Triton and Gluon against each other, product by product."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gemm_contenders import Problem, problem
from bexp.kernels.experts import triton_gemm
from bexp.kernels.experts.hopper import gemm as hopper_gemm
from bexp.kernels.experts.hopper import tiles as hopper
from bexp.kernels.experts.hopper.tiles import WIDE, HopperTiles
from bexp.kernels.experts.triton_tiles import LARGE, LOW, SHALLOW, SQUARE, Tiles
from bexp.kernels.triton_support import triton_failure
from bexp.measure.cuda_timing import CudaTimer

TOLERANCE = 1e-2
MOST_PROCESSES = 12
"""Each holds a context of the device."""

ROWS_TILES: dict[str, Tiles | HopperTiles] = {
    "large": LARGE,
    "large, strips of 16": replace(LARGE, group_m=16),
    "square": SQUARE,
    "square, flat": replace(SQUARE, flatten=True),
    "low": LOW,
    "low and wide": Tiles(64, 256, 64, num_stages=4, num_warps=4),
    "hopper wide": WIDE,
    "hopper wide, pieces in turn": replace(WIDE, columns=64, buffers=2),
    "hopper wide, 3 stages": replace(WIDE, stages=3, buffers=2),
    "hopper wide, strips of 16": replace(WIDE, group_m=16),
    "hopper tall": HopperTiles(2, 128, 128, 64, stages=4, columns=64),
    "hopper, three consumers": HopperTiles(3, 64, 256, 64, stages=3, columns=128),
    "hopper square": hopper.SQUARE,
    "hopper low and wide": hopper.LOW_WIDE,
    "hopper low": hopper.LOW,
    "hopper low, two a multiprocessor": replace(hopper.LOW, stages=4, programs=2),
    "hopper narrow": hopper.NARROW,
}
WEIGHTS_TILES: dict[str, Tiles | HopperTiles] = {
    "large": LARGE,
    "square": SQUARE,
    "shallow": SHALLOW,
    "shallow, three a multiprocessor": Tiles(128, 64, 32, 3, 4, programs_per_multiprocessor=3),
    "hopper wide": WIDE,
    "hopper wide, pieces in turn": replace(WIDE, columns=64, buffers=2),
    "hopper wide, 3 stages": replace(WIDE, stages=3, buffers=2),
    "hopper tall": HopperTiles(2, 128, 128, 64, stages=4, columns=64),
    "hopper, three consumers": HopperTiles(3, 64, 256, 64, stages=3, columns=128),
    "hopper medium": hopper.MEDIUM,
    "hopper wide, heavy experts first": replace(WIDE, dynamic=True),
    "hopper wide, 3 stages, heavy experts first": replace(WIDE, stages=3, buffers=2, dynamic=True),
    "hopper medium, heavy experts first": replace(hopper.MEDIUM, dynamic=True),
    "hopper short and low, two a multiprocessor": HopperTiles(1, 64, 256, 16, 4, columns=256, buffers=2, programs=2),
}
CHOICES = {"forward": ROWS_TILES, "dX": ROWS_TILES, "dW": WEIGHTS_TILES}


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


def compile_tiles(num_experts: Iterable[int], k: int, n: int) -> None:
    """Compile what `compare_tiles` runs for these numbers of experts, in processes of its own: it takes longer."""
    jobs = [(product, name, e, k, n) for e in num_experts for product, tiles in CHOICES.items() for name in tiles]
    processes = min(MOST_PROCESSES, os.cpu_count() or 1)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for _ in pool.map(_compile, jobs, chunksize=-(-len(jobs) // processes)):
            pass


def compare_tiles(given: Problem, timer: CudaTimer, deadline: float) -> list[dict[str, Any]]:
    """Seconds of forward, dX and dW with every choice of tiles, and how far each is from torch's result."""
    x, w, grad, ends = given.x, given.w, given.grad, given.ends
    wanted = {
        "forward": F.grouped_mm(x, w, offs=ends),
        "dX": F.grouped_mm(grad, w.transpose(1, 2), offs=ends),
        "dW": F.grouped_mm(x.t(), grad, offs=ends),
    }
    rows: list[dict[str, Any]] = []
    for product, choices in CHOICES.items():
        for name, tiles in choices.items():
            if time.monotonic() > deadline:
                return rows
            row = {"product": product, "tiles": name, **asdict(tiles)}
            rows.append(row | _compare(partial(_run, product, given, tiles=tiles), wanted[product], timer))
    return rows


def _run(product: str, given: Problem, out: Tensor | None, *, tiles: Tiles | HopperTiles) -> Tensor:
    kernels: Any = hopper_gemm if isinstance(tiles, HopperTiles) else triton_gemm
    if product == "dW":
        weights: Tensor = kernels.sum_over_rows(given.x, given.grad, given.ends, out=out, tiles=tiles)
        return weights
    x, transposed = (given.x, False) if product == "forward" else (given.grad, True)
    rows: Tensor = kernels.multiply_rows(x, given.w, given.ends, transposed=transposed, out=out, tiles=tiles)
    return rows


def _compile(job: tuple[str, str, int, int, int]) -> None:
    product, name, num_experts, k, n = job
    device = torch.device("cuda")
    given = problem((1,) * num_experts, k, n, torch.bfloat16, device)
    triton_failure(lambda: _run(product, given, None, tiles=CHOICES[product][name]).requires_grad_(), device)


def _compare(run: Callable[[Tensor], Tensor], wanted: Tensor, timer: CudaTimer) -> dict[str, Any]:
    out = torch.full_like(wanted, float("nan"))

    def differentiable() -> Tensor:
        return run(out).flatten()[0].detach().requires_grad_()

    reason = triton_failure(differentiable, wanted.device)
    if reason is not None:
        return {"reason": reason}
    difference = float(torch.linalg.vector_norm(out - wanted, dtype=torch.float32))
    difference /= float(torch.linalg.vector_norm(wanted, dtype=torch.float32))
    if not difference <= TOLERANCE:
        return {"reason": f"wrong by {difference:.1e}"}
    passes = _OnePass(lambda: run(out))
    timer.warm_up(passes)
    return {"seconds": timer.time(passes).device_seconds, "difference": difference}
