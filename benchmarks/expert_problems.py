"""What contenders compute in the tables of expert kernels, and the same in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.torch_block_sparse import BLOCK as BSR_BLOCK
from benchmarks.torch_block_sparse import TorchBSR
from benchmarks.variable_cases import Case
from bexp.explorer.model.expert_kernels import EXPERT_KERNELS
from bexp.kernels.experts import loop
from bexp.kernels.experts.block_sparse.block_experts import BLOCK, SDD
from bexp.kernels.experts.block_sparse.topology import block_topology
from bexp.kernels.experts.cublas_grouped import CublasGemm
from bexp.kernels.experts.registry import expert_backend, expert_support
from bexp.kernels.experts.rows import Rows
from bexp.kernels.shapes import ExpertsShape
from bexp.kernels.triton_support import triton_reason


@dataclass(frozen=True)
class Prepared:
    """A contender on operands in the layout that it needs.

    `run` returns the output and the gradients, and `in_order` brings them to the order of the reference.
    """

    run: Callable[[], list[Tensor]]
    operand_bytes: int
    in_order: Callable[[list[Tensor]], list[Tensor]] = lambda found: found
    setting: Mapping[str, str] = field(default_factory=dict)
    """What was chosen for it, by name, for its row."""


class Experts:
    """An expert FFN: tokens, routes and routing weights in, the sum of the experts out."""

    def __init__(self, shape: ExpertsShape, routes: Tensor) -> None:
        device, num_tokens = routes.device, routes.shape[0]
        generator = torch.Generator(device).manual_seed(0)
        normal = partial(torch.randn, generator=generator, device=device, dtype=shape.dtype)
        hidden, width, num_experts = shape.hidden_size, shape.ffn_hidden_size, shape.num_experts
        self.shape, self.routes = shape, routes
        weights = torch.softmax(torch.randn(routes.shape, generator=generator, device=device), -1).to(shape.dtype)
        w_in = normal(num_experts, hidden, 2 * width if shape.gated else width).mul_(hidden**-0.5)
        w_out = normal(num_experts, width, hidden).mul_(width**-0.5)
        self.gradient = normal(num_tokens, hidden)
        self.leaves = [t.requires_grad_() for t in (normal(num_tokens, hidden), weights, w_in, w_out)]
        self.flops = (18 if shape.gated else 12) * routes.numel() * hidden * width
        self.names: Sequence[str] = ("out", "x", "weights", "w_in", "w_out")
        self.wanted = self._reference()

    def contenders(self) -> dict[str, str | None]:
        """All expert back ends, and why one cannot serve this."""
        named = [kernel.name for kernel in EXPERT_KERNELS]
        return {support.name: support.reason for support in expert_support(self.shape, self.routes.device, named)}

    def prepare(self, name: str) -> Prepared:
        """A forward and backward by the back end."""
        return self.prepared(expert_backend(name).forward, self.leaves)

    def prepared(self, forward: Callable[..., Tensor], leaves: list[Tensor]) -> Prepared:
        """A forward and backward of `leaves`: x, weights, w_in and w_out."""
        x, weights, w_in, w_out = leaves

        def run() -> list[Tensor]:
            out = forward(x, self.routes, weights, w_in, w_out, self.shape.activation)
            return [out.detach(), *torch.autograd.grad(out, leaves, self.gradient)]

        return Prepared(run, sum(tensor.nbytes for tensor in (*leaves, self.gradient)))

    def _reference(self) -> list[Tensor]:
        """The same in float64, expert by expert, rounded to float32."""
        x, weights, w_in, w_out = self.leaves
        out, grad_x = (torch.zeros_like(x, dtype=torch.float64) for _ in range(2))
        grad_weights = torch.zeros_like(weights, dtype=torch.float32)
        grads = [torch.zeros_like(w, dtype=torch.float32) for w in (w_in, w_out)]
        for expert in range(w_in.shape[0]):
            tokens, places = (self.routes == expert).nonzero(as_tuple=True)
            if not len(tokens):
                continue
            parts = (x[tokens], weights[tokens, places], w_in[expert], w_out[expert])
            leaves = [part.detach().double().requires_grad_() for part in parts]
            mine = (self._activate(leaves[0] @ leaves[2]) @ leaves[3]) * leaves[1].unsqueeze(1)
            of_x, of_weights, *of_matrices = torch.autograd.grad(mine, leaves, self.gradient[tokens].double())
            out.index_add_(0, tokens, mine.detach())
            grad_x.index_add_(0, tokens, of_x)
            grad_weights[tokens, places] = of_weights.float()
            for grad, found in zip(grads, of_matrices, strict=True):
                grad[expert] = found.float()
        return [out.float(), grad_x.float(), grad_weights, *grads]

    def _activate(self, pre: Tensor) -> Tensor:
        activate = F.silu if self.shape.activation == "silu" else F.gelu
        if not self.shape.gated:
            return activate(pre)
        gate, up = pre.chunk(2, dim=-1)
        return activate(gate) * up


class Gemms:
    """The first product of the FFN, for rows that are sorted by expert, and both its gradients.

    Padding the rows is not timed, because in a layer the gather of the tokens can write them to any place. What reads
    the experts' numbers of rows is.
    """

    def __init__(self, case: Case, dtype: torch.dtype, counts: tuple[int, ...], device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        normal = partial(torch.randn, generator=generator, device=device, dtype=dtype)
        self.counts = counts
        self.ends = torch.tensor(counts).cumsum(0).to(device, torch.int32)
        self.gradient = normal(sum(counts), case.width)
        self.x = normal(sum(counts), case.hidden)
        self.w = normal(len(counts), case.hidden, case.width).mul_(case.hidden**-0.5).requires_grad_()
        self.flops = 6 * sum(counts) * case.hidden * case.width
        self.names: Sequence[str] = ("out", "x", "w")
        self.wanted = self._reference()
        self._shape = ExpertsShape(case.hidden, case.width, len(counts), 1, dtype, gated=False, activation="gelu")

    def contenders(self) -> dict[str, str | None]:
        """The products that stand alone, and why one cannot serve this."""
        device = self.gradient.device
        reasons = {s.name: s.reason for s in expert_support(self._shape, device, list(GEMMS))}
        return {name: reasons[name] if name in reasons else triton_reason(device) for name in GEMMS}

    def prepare(self, name: str) -> Prepared:
        """The product and both gradients, on rows that are padded as the contender needs them."""
        height, multiply = GEMMS[name]
        heights = [height(count, max(self.counts)) for count in self.counts]
        places = _places(self.counts, heights).to(self.x.device)
        x, gradient = (_padded(tensor, places, sum(heights)) for tensor in (self.x, self.gradient))
        leaves = [x.requires_grad_(), self.w]
        block = _BLOCKS.get(name)
        if block is not None:  # the product is the list of its blocks
            gradient = gradient.view(-1, block, gradient.shape[1] // block, block).transpose(1, 2).contiguous()

        def run() -> list[Tensor]:
            out = multiply(x, self.w, self)
            return [out.detach(), *torch.autograd.grad(out, leaves, gradient.view_as(out))]

        def in_order(found: list[Tensor]) -> list[Tensor]:
            out, grad_x, grad_w = found
            if block is not None:
                out = out.view(sum(heights) // block, -1, block, block).transpose(1, 2).reshape(sum(heights), -1)
            return [out.index_select(0, places), grad_x.index_select(0, places), grad_w]

        return Prepared(run, sum(tensor.nbytes for tensor in (x, self.w, gradient)), in_order)

    def _reference(self) -> list[Tensor]:
        out = torch.empty_like(self.gradient, dtype=torch.float32)
        grad_x, grad_w = (torch.zeros_like(tensor, dtype=torch.float32) for tensor in (self.x, self.w))
        bounds = pairwise([0, *torch.tensor(self.counts).cumsum(0).tolist()])
        for expert, (start, end) in enumerate(bounds):
            parts = (self.x[start:end], self.w[expert], self.gradient[start:end])
            rows, matrix, grad = (part.detach().double() for part in parts)
            out[start:end], grad_x[start:end], grad_w[expert] = rows @ matrix, grad @ matrix.T, rows.T @ grad
        return [out, grad_x, grad_w]


Multiply = Callable[[Tensor, Tensor, Gemms], Tensor]
"""Rows (R, K), padding included, and w (E, K, N) to their product (R, N), or to its blocks."""


def _hopper(x: Tensor, w: Tensor, given: Gemms) -> Tensor:
    from bexp.kernels.experts.hopper_grouped.gemm import multiply  # noqa: PLC0415 - needs Triton

    return multiply(x, w, given.ends)


def _loop(x: Tensor, w: Tensor, given: Gemms) -> Tensor:
    return loop.grouped_gemm(x, w, Rows(given.ends, given.ends, given.ends, _counted(given)))


def _bmm(x: Tensor, w: Tensor, given: Gemms) -> Tensor:
    return torch.bmm(x.view(w.shape[0], -1, x.shape[1]), w).view(x.shape[0], -1)


def _cublas(x: Tensor, w: Tensor, given: Gemms) -> Tensor:
    out: Tensor = CublasGemm.apply(x, w, _counted(given))  # type: ignore[no-untyped-call]  # untyped in torch
    return out


def _block_sparse(x: Tensor, w: Tensor, given: Gemms) -> Tensor:
    topology = block_topology(_counted(given), w.shape[2], BLOCK, x.device)
    out: Tensor = SDD.apply(x, w, topology)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


def _torch_bsr(x: Tensor, w: Tensor, given: Gemms) -> Tensor:
    topology = block_topology(_counted(given), w.shape[2], BSR_BLOCK, x.device)
    out: Tensor = TorchBSR.apply(x, w, topology)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


def _counted(given: Gemms) -> tuple[int, ...]:
    """The experts' rows, for which the host waits."""
    last = given.ends.tolist()
    return tuple(end - start for start, end in pairwise([0, *last]))


def _whole(block: int) -> Callable[[int, int], int]:
    return lambda count, most: -(-count // block) * block


_BLOCKS = {"block_sparse": BLOCK, "torch BSR": BSR_BLOCK}
GEMMS: Mapping[str, tuple[Callable[[int, int], int], Multiply]] = {
    "grouped_mm": (lambda count, most: count, lambda x, w, given: F.grouped_mm(x, w, offs=given.ends)),
    "loop": (lambda count, most: count, _loop),
    "bmm": (lambda count, most: most, _bmm),
    "hopper_grouped": (lambda count, most: count, _hopper),
    "cublas_grouped": (lambda count, most: count, _cublas),
    "block_sparse": (_whole(BLOCK), _block_sparse),
    "torch BSR": (_whole(BSR_BLOCK), _torch_bsr),
}
"""The height of an expert's rows, from their number and that of the largest, and the product."""


def _places(counts: tuple[int, ...], heights: list[int]) -> Tensor:
    """Where the sorted rows lie among padded ones."""
    rows, padded = torch.tensor(counts), torch.tensor(heights)
    shift = padded.cumsum(0) - padded - (rows.cumsum(0) - rows)
    return torch.arange(sum(counts)) + torch.repeat_interleave(shift, rows)


def _padded(tensor: Tensor, places: Tensor, height: int) -> Tensor:
    return tensor.new_zeros(height, tensor.shape[1]).index_copy_(0, places, tensor)
