"""Builds the kernels among which liger-kernel's fused MoE chooses, in several processes at once.

It tries 160 tiles of its six GEMMs in its first run, one after the other: minutes, of which most is the compiler's.
Each process builds a part of them into Triton's cache, from which the choice then takes them.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context

import torch

GEMMS = (
    *("_fused_up_proj_swiglu_kernel", "_fused_down_proj_kernel", "_moe_bwd_down_proj_kernel"),
    *("_moe_bwd_dX_expanded_kernel", "_moe_bwd_dW1_kernel", "_moe_bwd_dW2_kernel"),
)
SUMS = "_token_gather_weighted_sum_kernel"
SUM_TILES = 8
"""Of the 40 tiles of the sums over a token's rows, which it tries for each top_k anew."""
_MODULE = "liger_kernel.ops.fused_moe_kernels"


def build(hidden: int, width: int, device: str) -> None:
    """Build the kernels for these sizes."""
    processes = max(1, min(12, len(os.sched_getaffinity(0)) - 1))
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(_build, number, processes, hidden, width, device) for number in range(processes)]
        for job in jobs:
            job.result()


def fewer_sums() -> None:
    """Have this process try fewer tiles of the sums."""
    kernel = getattr(import_module(_MODULE), SUMS)
    kernel.configs = kernel.configs[:: -(-len(kernel.configs) // SUM_TILES)]


def _build(number: int, processes: int, hidden: int, width: int, device: str) -> None:
    module = import_module(_MODULE)
    for name in GEMMS:
        kernel = getattr(module, name)
        kernel.configs = kernel.configs[number::processes] or kernel.configs[:1]
    kernel = getattr(module, SUMS)
    kernel.configs = kernel.configs[:1]
    function = import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction
    x, w_in, w_out, weights = (
        torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=True)
        for shape in ((256, hidden), (8, 2 * width, hidden), (8, hidden, width), (256, 2))
    )
    routes = torch.arange(512, dtype=torch.int32, device=device).view(256, 2) % 8
    function.apply(x, w_in, w_out, routes, weights).sum().backward()
    torch.cuda.synchronize(device)
