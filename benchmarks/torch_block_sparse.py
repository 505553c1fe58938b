"""The block-sparse products of experts by torch's own BSR tensors, as far as it has them.

torch multiplies a BSR matrix with a dense one, and samples a dense product at the blocks of one. It has no product of a
transposed BSR matrix: its blocks are copied in the order of their columns. Both kernels are in Triton, in
`torch.sparse._triton_ops`, and take one matrix for all experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from bexp.kernels.experts.block_sparse.topology import Topology

BLOCK = 64
"""Whole blocks of both factors are held in shared memory."""


class TorchBSR(Function):
    """x (P, K), w (E, K, N) to the blocks (blocks, BLOCK, BLOCK) of their product."""

    @staticmethod
    def forward(ctx: Any, x_PK: Tensor, w_EKN: Tensor, topology: Topology) -> Tensor:
        from torch.sparse._triton_ops import sampled_addmm  # noqa: PLC0415 - defined where Triton is installed

        wide = w_EKN.transpose(0, 1).reshape(w_EKN.shape[1], -1)
        ctx.save_for_backward(x_PK, wide)
        ctx.topology, ctx.num_experts = topology, w_EKN.shape[0]
        values = x_PK.new_empty(topology.num_blocks, BLOCK, BLOCK)
        places = _sparse(topology.offsets, topology.column_indices, values, (x_PK.shape[0], wide.shape[1]))
        out: Tensor = sampled_addmm(places, x_PK, wide, beta=0.0).values()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        from torch.sparse._triton_ops import bsr_dense_mm  # noqa: PLC0415 - as above

        x_PK, wide = ctx.saved_tensors
        topology: Topology = ctx.topology
        shape = x_PK.shape[0], wide.shape[1]
        grad_x = bsr_dense_mm(_sparse(topology.offsets, topology.column_indices, grad.contiguous(), shape), wide.T)
        order = topology.blocks_t
        across = _sparse(topology.offsets_t, topology.row_indices[order], grad[order].mT.contiguous(), shape[::-1])
        grad_w = bsr_dense_mm(across, x_PK).view(ctx.num_experts, -1, x_PK.shape[1]).mT
        return grad_x, grad_w, None


def _sparse(offsets: Tensor, indices: Tensor, values: Tensor, size: tuple[int, ...]) -> Tensor:
    return torch.sparse_bsr_tensor(offsets, indices, values, size=size)
