"""Grouped GEMMs that are large enough for a CUDA device, and how close its results must come."""

from __future__ import annotations

import torch
from torch import Tensor

from bexp.kernels.experts.hopper_grouped import gemm as hopper
from tests.bexp.kernels import gemm_cases
from tests.bexp.kernels.gemm_cases import GemmCase

CUDA = torch.device("cuda")
TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 1e-2, torch.float32: 1e-5}
NAN = float("nan")


def zipf(num_rows: int, num_experts: int) -> tuple[int, ...]:
    share = 1 / torch.arange(1, num_experts + 1, dtype=torch.float64)
    return tuple((share / share.sum() * num_rows).long().tolist())


CASES = (
    *(case for case in gemm_cases.TINY),
    GemmCase("even", (256,) * 8, 256, 384),
    GemmCase("one more than a tile", (129, 65, 257, 1, 0, 127), 256, 384),
    GemmCase("skewed", zipf(5000, 64), 192, 320),
    GemmCase("mostly empty", (0,) * 100 + (300,) + (0,) * 100 + (5,), 128, 256),
    GemmCase("one takes all", (0, 0, 3001, 0), 512, 256),
    GemmCase("512 experts", tuple(i % 7 for i in range(512)), 128, 192),
    GemmCase("a single expert", (1000,), 384, 264),
    GemmCase("long sums", (1, 2000, 0, 700), 2048, 1024),
    GemmCase("the published uneven split, a 64th", (2043, 1233, 552, 1412, 22, 1882, 1009, 33), 512, 2048),
)


def hopper_gemm(x: Tensor, w: Tensor, counts: tuple[int, ...]) -> Tensor:
    return hopper.multiply(x, w, gemm_cases.ends_of(counts, CUDA))
