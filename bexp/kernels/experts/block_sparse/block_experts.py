"""The experts as block-sparse matrix products, as in MegaBlocks (Gale et al., 2023, MLSys).

Rows are padded to whole blocks of 128. The hidden activations are a sparse matrix: the first product makes it from
dense operands (SDD), the second multiplies it with a dense one (DSD). Their gradients are the same two products, and
for the matrices the transposed sparse matrix times the dense rows (DSD^T, DDS).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from bexp.kernels.activations import Activation, activate
from bexp.kernels.dtypes import dtype_name
from bexp.kernels.experts.block_sparse.topology import Topology, block_topology, blocked_rows
from bexp.kernels.experts.expert_backend import ExpertBackend
from bexp.kernels.experts.rows import combine, dispatch
from bexp.kernels.selective_recompute import recomputable
from bexp.kernels.shapes import ExpertsShape
from bexp.kernels.triton_support import launching_on, triton_failure, triton_reason

BLOCK = 128
_NUM_WARPS = 8
_STEPS = {torch.bfloat16: (64, 4), torch.float16: (64, 4), torch.float32: (16, 3)}
"""Of the sums, and how many of them are loaded at once. float32 is multiplied number by number, without TF32."""


def sdd(x_PK: Tensor, w: Tensor, topology: Topology, *, transposed: bool = False, out: Tensor | None = None) -> Tensor:
    """Return the blocks of x w[e]: (P, K) and (E, K, N), or (E, N, K) if `transposed`, to (blocks, block, block)."""
    from bexp.kernels.experts.block_sparse.kernels import sdd_kernel  # noqa: PLC0415 - needs Triton

    block = topology.block
    assert x_PK.is_contiguous()
    out = x_PK.new_empty(topology.num_blocks, block, block) if out is None else out
    k_axis, n_axis = (2, 1) if transposed else (1, 2)
    with launching_on(x_PK.device):
        sdd_kernel[(topology.num_blocks,)](
            x_PK,
            w,
            out,
            topology.row_indices,
            topology.column_indices,
            topology.columns_per_expert,
            x_PK.shape[1],
            w.stride(0),
            w.stride(k_axis),
            w.stride(n_axis),
            BLOCK=block,
            **_options(x_PK.dtype, block),
        )
    return out


def dsd(
    values: Tensor, w: Tensor, topology: Topology, *, transposed: bool = False, out: Tensor | None = None
) -> Tensor:
    """The sparse matrix times w[e] (E, H, N), or (E, N, H) where `transposed`: (blocks, block, block) to (P, N)."""
    from bexp.kernels.experts.block_sparse.kernels import dsd_kernel  # noqa: PLC0415 - needs Triton

    block = topology.block
    h_axis, n_axis = (2, 1) if transposed else (1, 2)
    n = w.shape[n_axis]
    assert values.is_contiguous()
    out = values.new_empty(topology.num_block_rows * block, n) if out is None else out
    block_n = min(block, BLOCK)
    with launching_on(values.device):
        dsd_kernel[(topology.num_block_rows * -(-n // block_n),)](
            values,
            w,
            out,
            topology.offsets,
            topology.column_indices,
            topology.columns_per_expert,
            n,
            w.stride(0),
            w.stride(h_axis),
            w.stride(n_axis),
            BLOCK=block,
            BLOCK_N=block_n,
            **_options(values.dtype, block),
        )
    return out


def transposed_dsd(
    values: Tensor, x_PN: Tensor, topology: Topology, out: Tensor, *, transposed: bool = False
) -> Tensor:
    """The sparse matrix' transpose times x by expert, into out (E, H, N), or (E, N, H) where `transposed` (DDS)."""
    from bexp.kernels.experts.block_sparse.kernels import transposed_dsd_kernel  # noqa: PLC0415 - needs Triton

    block = topology.block
    h_axis, n_axis = (2, 1) if transposed else (1, 2)
    n = x_PN.shape[1]
    assert values.is_contiguous()
    assert x_PN.is_contiguous()
    block_n = min(block, BLOCK)
    with launching_on(values.device):
        transposed_dsd_kernel[(topology.num_block_columns * -(-n // block_n),)](
            values,
            x_PN,
            out,
            topology.offsets_t,
            topology.blocks_t,
            topology.row_indices,
            topology.columns_per_expert,
            n,
            out.stride(0),
            out.stride(h_axis),
            out.stride(n_axis),
            BLOCK=block,
            BLOCK_N=block_n,
            **_options(values.dtype, block),
        )
    return out


class SDD(Function):
    """x (P, K), w (E, K, N) to the blocks (blocks, block, block) of their product."""

    @staticmethod
    def forward(ctx: Any, x_PK: Tensor, w_EKN: Tensor, topology: Topology) -> Tensor:
        """As `sdd`."""
        x_PK = x_PK.contiguous()
        ctx.save_for_backward(x_PK, w_EKN)
        ctx.topology = topology
        return sdd(x_PK, w_EKN, topology)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """The gradients of x and w."""
        x_PK, w_EKN = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = dsd(grad, w_EKN, ctx.topology, transposed=True) if ctx.needs_input_grad[0] else None
        grad_w = None
        if ctx.needs_input_grad[1]:
            grad_w = transposed_dsd(grad, x_PK, ctx.topology, torch.empty_like(w_EKN), transposed=True)
        return grad_x, grad_w, None


class DSD(Function):
    """Blocks (blocks, block, block) and w (E, H, N) to (P, N)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, w_EHN: Tensor, topology: Topology) -> Tensor:
        """As `dsd`."""
        values = values.contiguous()
        ctx.save_for_backward(values, w_EHN)
        ctx.topology = topology
        return dsd(values, w_EHN, topology)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """The gradients of the blocks and of w."""
        values, w_EHN = ctx.saved_tensors
        grad_PN = grad_PN.contiguous()
        grad_values = sdd(grad_PN, w_EHN, ctx.topology, transposed=True) if ctx.needs_input_grad[0] else None
        grad_w = None
        if ctx.needs_input_grad[1]:
            grad_w = transposed_dsd(values, grad_PN, ctx.topology, torch.empty_like(w_EHN))
        return grad_values, grad_w, None


def block_sparse_ffn(
    x_TD: Tensor,
    routes_TK: Tensor,
    weights_TK: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    activation: Activation,
    *,
    block: int = BLOCK,
) -> Tensor:
    """Do what `ExpertFFN` does. A block row's gate blocks are before its up blocks, as gate and up are in `w_in`."""
    num_experts, width = w_out.shape[0], w_out.shape[1]
    gated = w_in.shape[2] == 2 * width
    rows = blocked_rows(routes_TK, num_experts, block)
    outer = block_topology(rows.counts, w_in.shape[2], block, x_TD.device)
    inner = block_topology(rows.counts, width, block, x_TD.device) if gated else outer
    x_PD, weights_P = dispatch(x_TD, weights_TK, rows)
    blocks: Tensor = recomputable(lambda x: SDD.apply(x, w_in, outer), x_PD, product=True)  # type: ignore[no-untyped-call]  # in torch
    h = activate(blocks.view(outer.num_block_rows, -1), activation, gated=gated)
    h = recomputable(torch.mul, h.view(outer.num_block_rows, -1, block, block), weights_P.view(-1, 1, block, 1))
    y_PD: Tensor = DSD.apply(h.view(-1, block, block), w_out, inner)  # type: ignore[no-untyped-call]  # in torch
    return combine(y_PD, rows, routes_TK.shape[1])


def _options(dtype: torch.dtype, block: int) -> dict[str, Any]:
    """How a kernel is built."""
    step, num_stages = _STEPS[dtype]
    return {"BLOCK_K": min(block, step), "PRECISION": "ieee", "num_stages": num_stages, "num_warps": _NUM_WARPS}


def _check(shape: ExpertsShape, device: torch.device) -> str | None:
    dtype = shape.dtype
    if dtype not in _STEPS:
        return f"block_sparse has no products of {dtype_name(dtype)}"
    if shape.ffn_hidden_size % BLOCK:
        return f"block_sparse needs expert_ffn_hidden_size to be a multiple of {BLOCK}, not {shape.ffn_hidden_size}"
    reason = triton_reason(device)
    if reason is not None:
        return reason

    def run() -> Tensor:
        def normal(*size: int) -> Tensor:
            return torch.randn(size, dtype=dtype, device=device, requires_grad=True)

        routes = torch.arange(16, device=device).view(16, 1) % 2
        w_in, w_out = normal(3, 64, 2 * BLOCK), normal(3, BLOCK, 64)
        return block_sparse_ffn(normal(16, 64), routes, normal(16, 1), w_in, w_out, "silu")

    return triton_failure(run, device)


BLOCK_SPARSE = ExpertBackend("block_sparse", False, _check, block_sparse_ffn)
