"""Launches of the fused FFN's Hopper kernels. Shapes are named as in `ExpertFFN`; R is T * K.

Tensors are contiguous; a weight may also be the transpose of a contiguous tensor.

The kernels are compiled by Triton's Gluon and imported when first used: not every machine has it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bexp.kernels.activations import Activation
from bexp.kernels.experts.fused.hopper.tiles import HopperTile
from bexp.kernels.experts.fused.layouts import Operand
from bexp.kernels.experts.fused.token_permutation import Order
from bexp.kernels.experts.matrices import stored
from bexp.kernels.triton_support import launching_on, num_multiprocessors

_FEWEST_EXPERTS = 32
_WIDEST_INSTRUCTION_REGISTERS = 154
_WARPS_OF_A_GROUP = 4
_ALIGNMENT = 8


def project_in(
    x: Operand,
    weights_TK: Tensor,
    w_in: Tensor,
    hidden_size: int,
    activation: Activation,
    order: Order,
    tile: HopperTile,
    *,
    keep: bool,
) -> tuple[Tensor, Tensor | None]:
    """The weighted activation (R, H) and, with `keep`, what the activation was taken of (R, 2H or H)."""
    from bexp.kernels.experts.fused.hopper.gate_up_gemm import project_in_kernel  # noqa: PLC0415 - imports Triton

    num_pairs, width = order.pair_of_row.numel(), w_in.shape[2]
    gates = width // hidden_size
    columns = tile.BLOCK_N // gates
    hidden = w_in.new_empty(num_pairs, hidden_size)
    pre = w_in.new_empty(num_pairs, width) if keep else None
    matrices, transposed = stored(w_in)
    with launching_on(w_in.device):
        project_in_kernel[_grid(num_pairs, w_in.shape[0], hidden_size, columns, tile, w_in.device)](
            _rows(x, tile),
            _matrices(matrices, gates, columns, tile, transposed=transposed),
            hidden if pre is None else pre,
            hidden,
            weights_TK,
            order.token_of_row,
            order.pair_of_row,
            order.ends,
            w_in.shape[0],
            num_pairs,
            w_in.shape[1] // _ALIGNMENT,
            hidden_size // _ALIGNMENT,
            ACTIVATION=activation,
            KEEP=keep,
            GATES=gates,
            COLUMNS=columns,
            TRANSPOSED=transposed,
            **_options(tile, w_in, w_in.shape[1]),
        )
    return hidden, pre


def differentiate_hidden(
    grad: Operand,
    weights_TK: Tensor,
    pre: Tensor,
    w_out: Tensor,
    activation: Activation,
    order: Order,
    tile: HopperTile,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of `pre`, the weighted activation again (R, H), and summands of the weights' gradient (n, R)."""
    from bexp.kernels.experts.fused.hopper.differentiate_hidden import (  # noqa: PLC0415 - imports Triton
        differentiate_hidden_kernel,
    )

    num_experts, hidden_size, k = w_out.shape
    num_pairs = order.pair_of_row.numel()
    grad_pre, hidden = torch.empty_like(pre), pre.new_empty(num_pairs, hidden_size)
    columns = tile.BLOCK_N
    partial = torch.empty(-(-hidden_size // columns), num_pairs, dtype=torch.float32, device=pre.device)
    matrices, lies_transposed = stored(w_out)
    with launching_on(pre.device):
        differentiate_hidden_kernel[_grid(num_pairs, num_experts, hidden_size, columns, tile, pre.device)](
            _rows(grad, tile),
            _matrices(matrices, 1, columns, tile, transposed=not lies_transposed),
            _described(pre, list(tile.PIECE)),
            grad_pre,
            hidden,
            weights_TK,
            partial,
            order.token_of_row,
            order.pair_of_row,
            order.ends,
            num_experts,
            num_pairs,
            k // _ALIGNMENT,
            hidden_size // _ALIGNMENT,
            ACTIVATION=activation,
            GATES=pre.shape[1] // hidden_size,
            COLUMNS=columns,
            TRANSPOSED=not lies_transposed,
            **_options(tile, w_out, k),
        )
    return grad_pre, hidden, partial


def _grid(
    num_rows: int, num_experts: int, width: int, columns: int, tile: HopperTile, device: torch.device
) -> tuple[int]:
    row_tiles = num_rows // tile.block_m + min(num_experts, num_rows)
    return (min(row_tiles * -(-width // columns), num_multiprocessors(device)),)


def _rows(operand: Operand, tile: HopperTile) -> Any:
    assert operand.layout == ("tokens" if tile.gathered else "rows"), "as the tile says"
    return operand.tensor if tile.gathered else _described(operand.tensor, [tile.block_m, tile.block_k])


def _options(tile: HopperTile, w: Tensor, k: int) -> dict[str, Any]:
    """What both kernels are compiled for; the registers at the start bound what all partitions share."""
    wide = tile.launch_registers >= _WIDEST_INSTRUCTION_REGISTERS
    return {
        "GATHERED": tile.gathered,
        "EVEN_K": k % tile.block_k == 0,
        "ROWS": tile.ROWS,
        "BLOCK_K": tile.block_k,
        "WIDTH": tile.BLOCK_N if wide else tile.BLOCK_N // 2,
        "STAGES": tile.stages,
        "GROUP_M": tile.group,
        "EXPERTS": max(_FEWEST_EXPERTS, 1 << (w.shape[0] - 1).bit_length()),
        "A_LAYOUT": _layout([tile.block_m, tile.block_k], w),
        "B_LAYOUT": _layout([tile.block_k, tile.BLOCK_N], w),
        "SUMS_LAYOUT": _layout([tile.ROWS, tile.BLOCK_N // 2], w),
        "FINISHER_WARPS": tile.finisher_warps,
        "PRODUCER_WARPS": tile.producer_warps,
        "CONSUMER_REGISTERS": tile.consumer_registers,
        "OTHER_REGISTERS": tile.other_registers,
        "num_warps": _WARPS_OF_A_GROUP,
        "maxnreg": tile.launch_registers,
    }


def _matrices(matrices: Tensor, gates: int, columns: int, tile: HopperTile, *, transposed: bool) -> Any:
    """A tensor map over (E, K, gates, N), or over (E, gates, N, K) where the matrices lie transposed."""
    num_experts, first, second = matrices.shape
    if transposed:
        return _described(matrices.view(num_experts, gates, first // gates, second), [1, 1, columns, tile.block_k])
    return _described(matrices.view(num_experts, first, gates, second // gates), [1, tile.block_k, 1, columns])


def _described(tensor: Tensor, block: list[int]) -> Any:
    """A tensor map, swizzled as the product instructions read it."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: PLC0415 - optional

    return TensorDescriptor.from_tensor(tensor, block, _layout(block, tensor))


def _layout(block: list[int], like: Tensor) -> Any:
    from triton.experimental.gluon import language as gl  # noqa: PLC0415 - optional

    dtype = gl.bfloat16 if like.dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for(block, dtype)
