"""The Hopper kernels on tensors: forward and both gradients of a grouped GEMM, with the experts' bounds on the device.

The kernels are compiled by Triton's Gluon and imported when first used: not every machine has it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from bexp.kernels.experts.hopper.counter import tile_counter
from bexp.kernels.experts.hopper.tiles import MOST_ORDERED_EXPERTS, HopperTiles, rows_tiles, weights_tiles
from bexp.kernels.experts.matrices import stored
from bexp.kernels.experts.rows import Rows
from bexp.kernels.triton_support import aligned, launching_on, num_multiprocessors

ALIGNMENT = 8
"""K and N are multiples of this: rows of bulk copies start at multiples of 16 bytes."""
_FEWEST_EXPERTS = 32
_WARPS_OF_A_GROUP = 4


def multiply_rows(
    x_RK: Tensor,
    w: Tensor,
    ends: Tensor,
    *,
    transposed: bool = False,
    out: Tensor | None = None,
    tiles: HopperTiles | None = None,
) -> Tensor:
    """Each expert's rows by its matrix: (R, K) and (E, K, N), or (E, N, K) where `transposed`, to (R, N).

    `ends` (E,) int32 are the experts' last rows plus one, ascending to R. K and N are multiples of `ALIGNMENT`.
    """
    from bexp.kernels.experts.hopper.rows_kernel import rows_kernel  # noqa: PLC0415 - imports Triton

    x_RK, w = aligned(x_RK), aligned(w)
    num_rows, k = x_RK.shape
    num_experts, n = w.shape[0], w.shape[1] if transposed else w.shape[2]
    assert w.shape[2 if transposed else 1] == k, "x (R, K) and w (E, K, N), or (E, N, K) if transposed"
    out = x_RK.new_empty(num_rows, n) if out is None else out
    if out.numel() == 0:
        return out
    multiprocessors = num_multiprocessors(x_RK.device)
    tiles = tiles or rows_tiles(num_rows, num_experts, k, n, multiprocessors)
    row_tiles = num_rows // tiles.block_m + min(num_experts, num_rows)
    with launching_on(x_RK.device):
        rows_kernel[(min(row_tiles * -(-n // tiles.block_n), tiles.programs * multiprocessors),)](
            _described(x_RK, [tiles.rows, tiles.block_k]),
            _described(w, [1, tiles.block_n, tiles.block_k] if transposed else [1, tiles.block_k, tiles.block_n]),
            _described(out, [tiles.rows, tiles.columns]),
            out,
            ends,
            num_experts,
            k,
            n,
            out.stride(0),
            EXPERTS=_searched(num_experts),
            TRANSPOSED=transposed,
            BLOCK_K=tiles.block_k,
            **_sizes(tiles, num_experts),
        )
    return out


def sum_over_rows(
    x_RK: Tensor, grad_RN: Tensor, ends: Tensor, *, out: Tensor | None = None, tiles: HopperTiles | None = None
) -> Tensor:
    """Each expert's x^T grad over its rows: (R, K) and (R, N) to (E, K, N); zero for an expert without rows."""
    from bexp.kernels.experts.hopper.weights_kernel import weights_kernel  # noqa: PLC0415 - imports Triton

    x_RK, grad_RN = aligned(x_RK), aligned(grad_RN)
    num_rows, k = x_RK.shape
    num_experts, n = ends.shape[0], grad_RN.shape[1]
    out = x_RK.new_empty(num_experts, k, n) if out is None else out
    if num_rows == 0:
        return out.zero_()
    multiprocessors = num_multiprocessors(x_RK.device)
    tiles = tiles or weights_tiles(num_experts, k, n, multiprocessors)
    assert num_experts <= MOST_ORDERED_EXPERTS or not tiles.dynamic, f"{num_experts} experts are taken in their order"
    num_tiles = num_experts * -(-k // tiles.block_m) * -(-n // tiles.block_n)
    with launching_on(x_RK.device):
        weights_kernel[(min(num_tiles, tiles.programs * multiprocessors),)](
            _described(x_RK, [tiles.block_k, tiles.rows]),
            _described(grad_RN, [tiles.block_k, tiles.block_n]),
            _described(out, [1, tiles.rows, tiles.columns]),
            ends,
            tile_counter(x_RK.device) if tiles.dynamic else None,
            num_experts,
            k,
            n,
            BLOCK_R=tiles.block_k,
            EXPERTS=_searched(num_experts) if tiles.dynamic else 0,
            DYNAMIC=tiles.dynamic,
            **_sizes(tiles, num_experts if tiles.dynamic else 1),
        )
    return out


class HopperGemm(Function):
    """Forward by `multiply_rows`; backward by it with the matrices transposed, and by `sum_over_rows`."""

    @staticmethod
    def forward(ctx: Any, x_RK: Tensor, w_EKN: Tensor, ends: Tensor) -> Tensor:
        """x (R, K), w (E, K, N), or the transpose of a contiguous tensor, ends (E,) to (R, N)."""
        ctx.save_for_backward(x_RK, w_EKN, ends)
        w, transposed = stored(w_EKN)
        return multiply_rows(x_RK, w, ends, transposed=transposed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """The gradients of x and w, the latter in the layout of w."""
        x_RK, w_EKN, ends = ctx.saved_tensors
        w, transposed = stored(w_EKN)
        grad_RN = aligned(grad_RN)
        grad_x = multiply_rows(grad_RN, w, ends, transposed=not transposed) if ctx.needs_input_grad[0] else None
        grad_w = None
        if ctx.needs_input_grad[1]:
            grad_w = sum_over_rows(grad_RN, x_RK, ends).mT if transposed else sum_over_rows(x_RK, grad_RN, ends)
        return grad_x, grad_w, None


def grouped_gemm(x_RK: Tensor, w_EKN: Tensor, rows: Rows) -> Tensor:
    """As in `GroupedGemm`."""
    out: Tensor = HopperGemm.apply(x_RK, w_EKN, rows.ends)  # type: ignore[no-untyped-call] # torch's apply is untyped
    return out


def _searched(num_experts: int) -> int:
    """Numbers that a warp holds for this many experts: the power of two from that on."""
    return max(_FEWEST_EXPERTS, 1 << (num_experts - 1).bit_length())


def _sizes(tiles: HopperTiles, num_experts: int) -> dict[str, int]:
    """What both kernels are compiled for; the registers at the start bound what consumers and producer share."""
    return {
        "CONSUMERS": tiles.consumers,
        "ROWS": tiles.rows,
        "BLOCK_N": tiles.block_n,
        "WIDTH": tiles.width,
        "STAGES": tiles.stages,
        "BUFFERS": tiles.buffers,
        "GROUP_M": tiles.group_m,
        "PRODUCER_REGISTERS": tiles.producer_registers(num_experts),
        "CONSUMER_REGISTERS": tiles.consumer_registers(num_experts),
        "num_warps": _WARPS_OF_A_GROUP,
        "maxnreg": tiles.launch_registers,
    }


def _described(tensor: Tensor, block: list[int]) -> Any:
    """A tensor map, swizzled as the product instructions read it."""
    from triton.experimental.gluon import language as gl  # noqa: PLC0415 - optional
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: PLC0415 - optional

    dtype = gl.bfloat16 if tensor.dtype == torch.bfloat16 else gl.float16
    return TensorDescriptor.from_tensor(tensor, block, gl.NVMMASharedLayout.get_default_for(block, dtype))
