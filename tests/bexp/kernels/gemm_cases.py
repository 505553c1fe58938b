"""Grouped GEMM problems, and how close forward and both gradients come to float64; run on CPU and on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tests.bexp.kernels import references

Gemm = Callable[[Tensor, Tensor, tuple[int, ...]], Tensor]
"""x (R, K), w (E, K, N) and the experts' rows to (R, N); differentiable in the first two."""


@dataclass(frozen=True)
class GemmCase:
    name: str
    counts: tuple[int, ...]
    k: int
    n: int


TINY = (
    GemmCase("uneven with empty experts", (5, 0, 17, 16, 0, 33), 40, 24),
    GemmCase("the last takes all", (0, 0, 40), 16, 48),
    GemmCase("the first takes all", (40, 0, 0, 0), 48, 16),
    GemmCase("a single expert", (7,), 24, 40),
    GemmCase("one row each", (1,) * 20, 32, 16),
    GemmCase("a single row", (0, 1, 0), 16, 16),
)


def inputs(case: GemmCase, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x (R, K), w (E, K, N) and the output's gradient (R, N)."""
    generator = torch.Generator(device=device).manual_seed(seed)
    rows = sum(case.counts)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    return normal(rows, case.k), normal(len(case.counts), case.k, case.n) / case.k**0.5, normal(rows, case.n)


def run(gemm: Gemm, case: GemmCase, tensors: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Output and the gradients of x and w."""
    x, w = (tensor.detach().requires_grad_() for tensor in tensors[:2])
    out = gemm(x, w, case.counts)
    out.backward(tensors[2])
    assert x.grad is not None
    assert w.grad is not None
    return [out.detach(), x.grad, w.grad]


def expected(case: GemmCase, tensors: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """The same in float64, expert by expert, on the tensors' device."""
    x, w, grad = (tensor.double() for tensor in tensors)
    out, grad_x, grad_w = torch.zeros_like(grad), torch.zeros_like(x), torch.zeros_like(w)
    bounds = [0, *torch.tensor(case.counts).cumsum(0).tolist()]
    for e, (start, end) in enumerate(pairwise(bounds)):
        out[start:end] = x[start:end] @ w[e]
        grad_x[start:end] = grad[start:end] @ w[e].T
        grad_w[e] = x[start:end].T @ grad[start:end]
    return [out, grad_x, grad_w]


def errors(gemm: Gemm, case: GemmCase, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Relative error of the output and of the gradients of x and w."""
    tensors = inputs(case, dtype, device)
    triples = zip(("out", "x", "w"), run(gemm, case, tensors), expected(case, tensors), strict=True)
    return {name: references.relative_error(actual, wanted) for name, actual, wanted in triples}


def ends_of(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Cumulative rows, int32."""
    return torch.tensor(counts).cumsum(0).to(device, torch.int32)
