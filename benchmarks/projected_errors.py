"""Relative errors of large grouped GEMMs against float64, for a small part of the cost of computing them again.

With r standard normal, the mean of |A r|^2 is the squared Frobenius norm of A. So the norm of the difference between
a result and what is wanted is estimated from both, multiplied by a few random vectors; and what is wanted is a product
of two matrices, so that (X W) r = X (W r) needs no large product. The idea is that of Freivalds (1977) for checking a
product. Every number of the result counts: one that is wrong moves the estimate, one that is NaN makes it NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from benchmarks.gemm_contenders import Operands, Problem
from bexp.kernels.experts.comparisons.block_sparse import BLOCK

NUM_VECTORS = 8
_CHUNK_NUMBERS = 1 << 26
"""Numbers that are converted to float64 at a time."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Random vectors, and what the wanted product (R, N), dX (R, K) and dW (E, K, N) make of them, all in float64.

    `of_n` (N, V) multiplies the product and dW, `of_k` (K, V) dX; `w` is (E, K, V).
    """

    of_n: Tensor
    of_k: Tensor
    out: Tensor
    x: Tensor
    w: Tensor


def reference(given: Problem) -> Reference:
    """From the operands alone."""
    generator = torch.Generator(given.x.device).manual_seed(1)
    num_experts, k, n = given.w.shape

    def normal(size: int) -> Tensor:
        return torch.randn(size, NUM_VECTORS, dtype=torch.float64, device=given.x.device, generator=generator)

    of_n, of_k = normal(n), normal(k)
    rows = given.x.shape[0]
    out, x = (torch.empty(rows, NUM_VECTORS, dtype=torch.float64, device=given.x.device) for _ in range(2))
    w = torch.zeros(num_experts, k, NUM_VECTORS, dtype=torch.float64, device=given.x.device)
    for expert, (first, last) in enumerate(_bounds(given)):
        matrix = given.w[expert].double()
        w_r, wt_r = matrix @ of_n, matrix.T @ of_k
        del matrix
        for start, end in _chunks(first, last, max(k, n)):
            out[start:end] = given.x[start:end].double() @ w_r
            grad = given.grad[start:end].double()
            x[start:end] = grad @ wt_r
            w[expert] += given.x[start:end].double().T @ (grad @ of_n)
    return Reference(of_n, of_k, out, x, w)


def projected_errors(
    wanted: Reference, operands: Operands, out: Tensor, grads: tuple[Tensor, Tensor] | None
) -> dict[str, float]:
    """Relative errors in norm of the product, and of dX and dW if they are given, in the contender's own layout."""
    errors = {"out": _of_rows(out, operands, wanted.of_n, wanted.out)}
    if grads is not None:
        errors["x"] = _of_rows(grads[0], operands, wanted.of_k, wanted.x)
        actual = torch.stack([matrix.double() @ wanted.of_n for matrix in grads[1]])
        errors["w"] = _relative(_squares(actual - wanted.w), _squares(wanted.w))
    return errors


def is_within(errors: dict[str, float], tolerance: float) -> bool:
    """Whether every error is a number and small; a NaN is neither."""
    return all(error <= tolerance for error in errors.values())


def _of_rows(tensor: Tensor, operands: Operands, vectors: Tensor, wanted: Tensor) -> float:
    difference = 0.0
    for start, end in _chunks(0, wanted.shape[0], vectors.shape[0]):
        actual = _rows(tensor, operands, start, end).double() @ vectors
        difference += _squares(actual - wanted[start:end])
    return _relative(difference, _squares(wanted))


def _rows(tensor: Tensor, operands: Operands, start: int, end: int) -> Tensor:
    """The sorted rows from `start` to `end`, wherever the contender keeps them."""
    if operands.rows is None:
        return tensor[start:end]
    rows = operands.rows[start:end]
    if tensor.dim() == 2:
        return tensor[rows]
    blocks = tensor.view(operands.x.shape[0] // BLOCK, -1, BLOCK, BLOCK)  # block rows, block columns
    return blocks[rows // BLOCK, :, rows % BLOCK].flatten(1)


def _bounds(given: Problem) -> Iterator[tuple[int, int]]:
    return pairwise([0, *torch.tensor(given.counts).cumsum(0).tolist()])


def _chunks(first: int, last: int, width: int) -> Iterator[tuple[int, int]]:
    step = max(1, _CHUNK_NUMBERS // width)
    for start in range(first, last, step):
        yield start, min(last, start + step)


def _squares(tensor: Tensor) -> float:
    return float(tensor.square().sum())


def _relative(difference: float, wanted: float) -> float:
    return math.sqrt(difference / wanted) if wanted else math.inf
