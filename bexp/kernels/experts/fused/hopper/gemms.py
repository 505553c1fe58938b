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
from bexp.kernels.experts.fused.token_permutation import TokenPermutation
from bexp.kernels.experts.hopper.launch import (
    ALIGNMENT,
    WARPS_OF_A_GROUP,
    most_row_tiles,
    searched_experts,
    shared_layout,
    tensor_map,
)
from bexp.kernels.experts.matrices import stored
from bexp.kernels.triton_support import launching_on, num_multiprocessors

_WIDEST_INSTRUCTION_REGISTERS = 154


def gate_up_gemm(
    x: Operand,
    weights_TK: Tensor,
    w_in: Tensor,
    hidden_size: int,
    activation: Activation,
    permutation: TokenPermutation,
    tile: HopperTile,
    *,
    keep: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the weighted activation (R, H) and, if `keep`, the input of the activation (R, 2H or H)."""
    from bexp.kernels.experts.fused.hopper.gate_up_gemm import gate_up_gemm_kernel  # noqa: PLC0415 - imports Triton

    num_pairs, width = permutation.pair_of_row.numel(), w_in.shape[2]
    gates = width // hidden_size
    columns = tile.BLOCK_N // gates
    hidden = w_in.new_empty(num_pairs, hidden_size)
    pre = w_in.new_empty(num_pairs, width) if keep else None
    matrices, transposed = stored(w_in)
    with launching_on(w_in.device):
        gate_up_gemm_kernel[_grid(num_pairs, w_in.shape[0], hidden_size, columns, tile, w_in.device)](
            _rows(x, tile),
            _matrices(matrices, gates, columns, tile, transposed=transposed),
            hidden if pre is None else pre,
            hidden,
            weights_TK,
            permutation.token_of_row,
            permutation.pair_of_row,
            permutation.ends,
            w_in.shape[0],
            num_pairs,
            w_in.shape[1] // ALIGNMENT,
            hidden_size // ALIGNMENT,
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
    permutation: TokenPermutation,
    tile: HopperTile,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of `pre`, the weighted activation (R, H), and summands of the weights' gradient (n, R)."""
    from bexp.kernels.experts.fused.hopper.differentiate_hidden import (  # noqa: PLC0415 - imports Triton
        differentiate_hidden_kernel,
    )

    num_experts, hidden_size, k = w_out.shape
    num_pairs = permutation.pair_of_row.numel()
    grad_pre, hidden = torch.empty_like(pre), pre.new_empty(num_pairs, hidden_size)
    columns = tile.BLOCK_N
    partial = torch.empty(-(-hidden_size // columns), num_pairs, dtype=torch.float32, device=pre.device)
    matrices, lies_transposed = stored(w_out)
    with launching_on(pre.device):
        differentiate_hidden_kernel[_grid(num_pairs, num_experts, hidden_size, columns, tile, pre.device)](
            _rows(grad, tile),
            _matrices(matrices, 1, columns, tile, transposed=not lies_transposed),
            tensor_map(pre, list(tile.PIECE)),
            grad_pre,
            hidden,
            weights_TK,
            partial,
            permutation.token_of_row,
            permutation.pair_of_row,
            permutation.ends,
            num_experts,
            num_pairs,
            k // ALIGNMENT,
            hidden_size // ALIGNMENT,
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
    row_tiles = most_row_tiles(num_rows, num_experts, tile.block_m)
    return (min(row_tiles * -(-width // columns), num_multiprocessors(device)),)


def _rows(operand: Operand, tile: HopperTile) -> Any:
    assert operand.layout == ("tokens" if tile.gathered else "rows"), "as the tile says"
    return operand.tensor if tile.gathered else tensor_map(operand.tensor, [tile.block_m, tile.block_k])


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
        "EXPERTS": searched_experts(w.shape[0]),
        "A_LAYOUT": shared_layout([tile.block_m, tile.block_k], w),
        "B_LAYOUT": shared_layout([tile.block_k, tile.BLOCK_N], w),
        "SUMS_LAYOUT": shared_layout([tile.ROWS, tile.BLOCK_N // 2], w),
        "EPILOGUE_WARPS": tile.epilogue_warps,
        "PRODUCER_WARPS": tile.producer_warps,
        "CONSUMER_REGISTERS": tile.consumer_registers,
        "OTHER_REGISTERS": tile.other_registers,
        "num_warps": WARPS_OF_A_GROUP,
        "maxnreg": tile.launch_registers,
    }


def _matrices(matrices: Tensor, gates: int, columns: int, tile: HopperTile, *, transposed: bool) -> Any:
    """A tensor map over (E, K, gates, N), or over (E, gates, N, K) where the matrices lie transposed."""
    num_experts, first, second = matrices.shape
    if transposed:
        return tensor_map(matrices.view(num_experts, gates, first // gates, second), [1, 1, columns, tile.block_k])
    return tensor_map(matrices.view(num_experts, first, gates, second // gates), [1, tile.block_k, 1, columns])
