"""Grouped GEMMs that are timed against each other. Each gets the operands in the layout that it needs.

A contender's work on the host is part of its time: the loop, cuBLAS and the block-sparse products first read the
experts' bounds from the device, as they must in a layer. Padding the rows (bmm, block_sparse) is not part of it,
because in a layer the gather of the tokens can write them to any place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.contenders import cublas_grouped
from benchmarks.contenders.block_sparse import BLOCK, SDD
from benchmarks.contenders.block_topology import block_topology
from bexp.kernels.experts import loop, triton_gemm
from bexp.kernels.experts.hopper_grouped import gemm as hopper_gemm
from bexp.kernels.experts.registry import AUTO_EXPERTS
from bexp.kernels.experts.rows import Rows


@dataclass(frozen=True)
class Problem:
    """x (R, K) sorted by expert, w (E, K, N), the gradient (R, N), and the experts' ends (E,) int32 and counts."""

    x: Tensor
    w: Tensor
    grad: Tensor
    ends: Tensor
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Operands:
    """x and w to differentiate, the gradient of the output, and where the sorted rows lie in x (None: in order)."""

    x: Tensor
    w: Tensor
    grad: Tensor
    rows: Tensor | None
    multiply: Callable[[Tensor, Tensor], Tensor]


class GemmPasses:
    """A forward and a backward as the profiler's timers run them. Nothing is written before a pass: caches are cold."""

    training = True
    is_chainable = False

    def __init__(self, operands: Operands) -> None:
        self.operands = operands
        self.output: Tensor | None = None

    def prepare_forward(self) -> None:
        """Forget the last pass, so that no gradient is accumulated."""
        self.output = self.operands.x.grad = self.operands.w.grad = None

    def forward(self) -> None:
        """Multiply."""
        self.output = self.operands.multiply(self.operands.x, self.operands.w)

    def prepare_backward(self) -> None:
        """The gradient is there."""

    def backward(self) -> None:
        """Both gradients."""
        assert self.output is not None
        torch.autograd.backward(self.output, self.operands.grad.view_as(self.output))

    def run_chain(self, length: int) -> None:
        """A product's output is not shaped like its input."""
        raise AssertionError(length)


def problem(counts: tuple[int, ...], k: int, n: int, dtype: torch.dtype, device: torch.device) -> Problem:
    """Random operands; outputs of variance 1."""
    rows = sum(counts)
    return Problem(
        torch.randn(rows, k, dtype=dtype, device=device),
        torch.randn(len(counts), k, n, dtype=dtype, device=device).mul_(k**-0.5),
        torch.randn(rows, n, dtype=dtype, device=device),
        torch.tensor(counts).cumsum(0).to(device, torch.int32),
        counts,
    )


def errors(passes: GemmPasses, given: Problem) -> dict[str, float]:
    """Relative errors of output and gradients in norm, against float64, from one forward and backward."""
    passes.prepare_forward()
    passes.forward()
    passes.backward()
    assert passes.output is not None
    operands = passes.operands
    assert operands.x.grad is not None
    assert operands.w.grad is not None
    out, grad_x = (_sorted(t, operands) for t in (passes.output.detach(), operands.x.grad))
    squares: dict[str, list[Tensor]] = {"out": [], "x": [], "w": []}
    bounds = pairwise([0, *torch.tensor(given.counts).cumsum(0).tolist()])
    for e, (start, end) in enumerate(bounds):
        x, w, grad = given.x[start:end].double(), given.w[e].double(), given.grad[start:end].double()
        wanted = {"out": x @ w, "x": grad @ w.T, "w": x.T @ grad}
        actual = {"out": out[start:end], "x": grad_x[start:end], "w": operands.w.grad[e]}
        for name, value in wanted.items():
            difference = (actual[name].double() - value).square().sum()
            squares[name].append(torch.stack([difference, value.square().sum()]))
    passes.prepare_forward()
    totals = {name: torch.stack(values).sum(0).tolist() for name, values in squares.items()}
    return {name: (difference / wanted) ** 0.5 for name, (difference, wanted) in totals.items()}


def _sorted(tensor: Tensor, operands: Operands) -> Tensor:
    """(R, columns) in the order of the sorted rows, from the contender's own layout."""
    if tensor.dim() == 3 and operands.rows is not None:  # blocks (block rows * columns, block, block)
        block_rows = operands.x.shape[0] // BLOCK
        tensor = tensor.view(block_rows, -1, BLOCK, BLOCK).transpose(1, 2).reshape(operands.x.shape[0], -1)
    return tensor if operands.rows is None else tensor.index_select(0, operands.rows)


def _leaves(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x.detach().requires_grad_(), w.detach().requires_grad_()


def _counted(ends: Tensor) -> Rows:
    """Rows whose counts have come to the host, which waits for them."""
    last = ends.tolist()
    return Rows(ends, ends, ends, tuple(b - a for a, b in zip([0, *last[:-1]], last, strict=True)))


def _padded(given: Problem, heights: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """x and the gradient with `heights` rows an expert, zero where there are none, and where the rows went."""
    counts = torch.tensor(given.counts)
    shift = torch.tensor(heights).cumsum(0) - torch.tensor(heights) - (counts.cumsum(0) - counts)
    rows = torch.arange(sum(given.counts)) + torch.repeat_interleave(shift, counts)
    rows = rows.to(given.x.device)
    x = given.x.new_zeros(sum(heights), given.x.shape[1]).index_copy_(0, rows, given.x)
    grad = given.grad.new_zeros(sum(heights), given.grad.shape[1]).index_copy_(0, rows, given.grad)
    return x, grad, rows


def _loop(given: Problem) -> Operands:
    x, w = _leaves(given.x, given.w)
    return Operands(x, w, given.grad, None, lambda x, w: loop.grouped_gemm(x, w, _counted(given.ends)))


def _bmm(given: Problem) -> Operands:
    capacity = max(given.counts)
    padded, grad, rows = _padded(given, [capacity] * len(given.counts))
    x, w = _leaves(padded, given.w)

    def multiply(x: Tensor, w: Tensor) -> Tensor:
        return torch.bmm(x.view(w.shape[0], capacity, -1), w).view(x.shape[0], -1)

    return Operands(x, w, grad, rows, multiply)


def _grouped_mm(given: Problem) -> Operands:
    x, w = _leaves(given.x, given.w)
    return Operands(x, w, given.grad, None, lambda x, w: F.grouped_mm(x, w, offs=given.ends))


def _cublas_grouped(given: Problem) -> Operands:
    x, w = _leaves(given.x, given.w)
    return Operands(x, w, given.grad, None, lambda x, w: cublas_grouped.grouped_gemm(x, w, _counted(given.ends)))


def _triton_grouped(given: Problem) -> Operands:
    x, w = _leaves(given.x, given.w)
    rows = Rows(given.ends, given.ends, given.ends)
    return Operands(x, w, given.grad, None, lambda x, w: triton_gemm.grouped_gemm(x, w, rows))


def _hopper_grouped(given: Problem) -> Operands:
    x, w = _leaves(given.x, given.w)
    rows = Rows(given.ends, given.ends, given.ends)
    return Operands(x, w, given.grad, None, lambda x, w: hopper_gemm.grouped_gemm(x, w, rows))


def _auto(given: Problem) -> Operands:
    x, w = _leaves(given.x, given.w)
    rows = Rows(given.ends, given.ends, given.ends)
    return Operands(x, w, given.grad, None, lambda x, w: AUTO_EXPERTS.gemms(x, w, rows))


def _auto_counted(given: Problem) -> Operands:
    x, w = _leaves(given.x, given.w)
    rows = Rows(given.ends, given.ends, given.ends, given.counts)
    return Operands(x, w, given.grad, None, lambda x, w: AUTO_EXPERTS.gemms(x, w, rows))


def _block_sparse(given: Problem) -> Operands:
    padded, grad, rows = _padded(given, [-(-count // BLOCK) * BLOCK for count in given.counts])
    x, w = _leaves(padded, given.w)
    columns = grad.shape[1] // BLOCK
    blocks = grad.view(-1, BLOCK, columns, BLOCK).transpose(1, 2).reshape(-1, BLOCK, BLOCK)

    def multiply(x: Tensor, w: Tensor) -> Tensor:
        topology = block_topology(_counted(given.ends).counts, w.shape[2], BLOCK, x.device)
        out: Tensor = SDD.apply(x, w, topology)  # type: ignore[no-untyped-call]  # untyped in torch
        return out

    return Operands(x, w, blocks, rows, multiply)


BASELINES: dict[str, Callable[[Problem], Operands]] = {"loop": _loop, "bmm": _bmm, "grouped_mm": _grouped_mm}
OURS: dict[str, Callable[[Problem], Operands]] = {
    "cublas_grouped": _cublas_grouped,
    "triton_grouped": _triton_grouped,
    "hopper_grouped": _hopper_grouped,
    "block_sparse": _block_sparse,
}
CHOSEN: dict[str, Callable[[Problem], Operands]] = {"auto": _auto}
"""Not a kernel, but a choice of kernels by a table that is measured beforehand."""
COUNTED: dict[str, Callable[[Problem], Operands]] = {"auto_counted": _auto_counted}
"""The same choice with the experts' counts on the host, which `bmm` has too."""
