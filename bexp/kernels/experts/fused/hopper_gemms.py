"""Launches of the fused FFN's Hopper kernels, as `fused/gemms` describes them.

The kernels are compiled by Triton's Gluon and imported when first used: not every machine has it.
"""

from __future__ import annotations

from typing import Any

from bexp.kernels.experts.fused.hopper_tiles import HopperTile
from bexp.kernels.experts.fused.layouts import FusedShape, Operand
from bexp.kernels.experts.fused.token_permutation import TokenPermutation
from bexp.kernels.experts.hopper_grouped.launch import (
    ALIGNMENT,
    WARPS_OF_A_GROUP,
    most_row_tiles,
    searched_experts,
    shared_layout,
    tensor_map,
)
from bexp.kernels.launcher import Launch, Pointer
from bexp.kernels.triton_support import num_multiprocessors

_WIDEST_INSTRUCTION_REGISTERS = 154


def gate_up_gemm(
    x: Operand,
    pre: Pointer,
    hidden: Pointer,
    shape: FusedShape,
    permutation: TokenPermutation,
    tile: HopperTile,
    *,
    keep: bool,
) -> Launch:
    """Write the weighted activation (R, H) and, if `keep`, the input of the activation `pre` (R, 2H or H)."""
    from bexp.kernels.experts.fused.hopper_gate_up_gemm import gate_up_gemm_kernel  # noqa: PLC0415 - imports Triton

    gates = 2 if shape.gated else 1
    columns = tile.BLOCK_N // gates
    sizes = (shape.token_size, shape.hidden_size)
    return Launch(
        gate_up_gemm_kernel,
        _grid(columns, tile, shape),
        {
            "x": _rows(x, tile, shape),
            "w_desc": _matrices("w_in", sizes, gates, columns, tile, shape, transposed=shape.in_transposed),
            "pre": pre,
            "hidden": hidden,
            "KEEP": keep,
            "GATES": gates,
            "COLUMNS": columns,
            "TRANSPOSED": shape.in_transposed,
            **_arguments(tile, shape, permutation),
        },
        **_options(tile),
    )


def differentiate_hidden(
    grad: Operand,
    pre: Pointer,
    grad_pre: Pointer,
    hidden: Pointer,
    partial: Pointer,
    shape: FusedShape,
    permutation: TokenPermutation,
    tile: HopperTile,
) -> Launch:
    """Write the gradient of `pre`, the weighted activation (R, H), and summands of the weights' gradient (n, R)."""
    from bexp.kernels.experts.fused.hopper_differentiate_hidden import (  # noqa: PLC0415 - imports Triton
        differentiate_hidden_kernel,
    )

    columns = tile.BLOCK_N
    transposed = not shape.out_transposed
    sizes = (shape.token_size, shape.hidden_size)
    return Launch(
        differentiate_hidden_kernel,
        _grid(columns, tile, shape),
        {
            "grad": _rows(grad, tile, shape),
            "w_desc": _matrices("w_out", sizes, 1, columns, tile, shape, transposed=transposed),
            "pre_desc": tensor_map(pre, (shape.num_pairs, shape.pre_size), tile.PIECE, shape.dtype),
            "grad_pre": grad_pre,
            "hidden": hidden,
            "partial": partial,
            "GATES": 2 if shape.gated else 1,
            "COLUMNS": columns,
            "TRANSPOSED": transposed,
            **_arguments(tile, shape, permutation),
        },
        **_options(tile),
    )


def _grid(columns: int, tile: HopperTile, shape: FusedShape) -> tuple[int]:
    row_tiles = most_row_tiles(shape.num_pairs, shape.num_experts, tile.block_m)
    return (min(row_tiles * -(-shape.hidden_size // columns), num_multiprocessors(shape.place)),)


def _rows(operand: Operand, tile: HopperTile, shape: FusedShape) -> Any:
    assert operand.layout == ("tokens" if tile.gathered else "rows"), "as the tile says"
    if tile.gathered:
        return operand.pointer
    return tensor_map(operand.pointer, (operand.num_rows, operand.width), (tile.block_m, tile.block_k), shape.dtype)


def _arguments(tile: HopperTile, shape: FusedShape, permutation: TokenPermutation) -> dict[str, Any]:
    """What both kernels take, and what both are compiled for."""
    wide = tile.launch_registers >= _WIDEST_INSTRUCTION_REGISTERS
    dtype = shape.dtype
    return {
        "weights": Pointer("weights"),
        "token_of_row": permutation.token_of_row,
        "pair_of_row": permutation.pair_of_row,
        "ends": permutation.ends,
        "num_experts": shape.num_experts,
        "num_rows": shape.num_pairs,
        "eighth_of_K": shape.token_size // ALIGNMENT,
        "eighth_of_H": shape.hidden_size // ALIGNMENT,
        "ACTIVATION": shape.activation,
        "GATHERED": tile.gathered,
        "EVEN_K": shape.token_size % tile.block_k == 0,
        "ROWS": tile.ROWS,
        "BLOCK_K": tile.block_k,
        "WIDTH": tile.BLOCK_N if wide else tile.BLOCK_N // 2,
        "STAGES": tile.stages,
        "GROUP_M": tile.group,
        "EXPERTS": searched_experts(shape.num_experts),
        "A_LAYOUT": shared_layout((tile.block_m, tile.block_k), dtype),
        "B_LAYOUT": shared_layout((tile.block_k, tile.BLOCK_N), dtype),
        "SUMS_LAYOUT": shared_layout((tile.ROWS, tile.BLOCK_N // 2), dtype),
        "EPILOGUE_WARPS": tile.epilogue_warps,
        "PRODUCER_WARPS": tile.producer_warps,
        "CONSUMER_REGISTERS": tile.consumer_registers,
        "OTHER_REGISTERS": tile.other_registers,
    }


def _options(tile: HopperTile) -> dict[str, int]:
    """What the compiler is told; the registers at the start bound what all partitions share."""
    return {"num_warps": WARPS_OF_A_GROUP, "maxnreg": tile.launch_registers}


def _matrices(
    name: str,
    sizes: tuple[int, int],
    gates: int,
    columns: int,
    tile: HopperTile,
    shape: FusedShape,
    *,
    transposed: bool,
) -> Any:
    """A tensor map over (E, K, gates, N), or over (E, gates, N, K) where the matrices lie transposed, for (K, N)."""
    (k, n), num_experts = sizes, shape.num_experts
    if transposed:
        return tensor_map(Pointer(name), (num_experts, gates, n, k), (1, 1, columns, tile.block_k), shape.dtype)
    return tensor_map(Pointer(name), (num_experts, k, gates, n), (1, tile.block_k, 1, columns), shape.dtype)
