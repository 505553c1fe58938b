"""Launches of the grouped GEMMs, each prepared for one `FusedShape`. R is T * K; other sizes are as in `ExpertFFN`.

Tensors are contiguous; a weight may also be the transpose
of a contiguous tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from bexp.kernels.experts.fused import hopper_gemms as hopper
from bexp.kernels.experts.fused.down_gemm import down_gemm_kernel
from bexp.kernels.experts.fused.hopper_tiles import HopperRows, HopperSum, HopperTile
from bexp.kernels.experts.fused.layouts import FusedShape, Operand
from bexp.kernels.experts.fused.tiles import TileConfig
from bexp.kernels.experts.fused.token_permutation import TokenPermutation
from bexp.kernels.experts.fused.triton_differentiate_hidden import differentiate_hidden_kernel
from bexp.kernels.experts.fused.triton_gate_up_gemm import gate_up_gemm_kernel
from bexp.kernels.experts.fused.wgrad import wgrad_kernel
from bexp.kernels.experts.hopper_grouped.gemm import rows_launch, weights_launch
from bexp.kernels.launcher import Blocks, Launch, Pointer
from bexp.kernels.triton_support import num_multiprocessors

_INTERPRETER_PROGRAMS = 3


def gate_up_gemm(
    x: Operand,
    pre: Pointer,
    hidden: Pointer,
    shape: FusedShape,
    permutation: TokenPermutation,
    tile: TileConfig | HopperTile,
    *,
    keep: bool,
) -> Launch:
    """Write the weighted activation (R, H) and, if `keep`, the input of the activation `pre` (R, 2H or H)."""
    if isinstance(tile, HopperTile):
        return hopper.gate_up_gemm(x, pre, hidden, shape, permutation, tile, keep=keep)
    tiles = permutation.tiles[tile.block_m]
    stored = (shape.token_size, shape.pre_size)
    return Launch(
        gate_up_gemm_kernel,
        _grid(tile, tiles.most, shape.hidden_size, shape),
        {
            "x": _rows_of(x, tile),
            "w": _matrices("w_in", stored, tile, shape, transposed=shape.in_transposed),
            "pre": pre,
            "hidden": hidden,
            **_tiled_rows(permutation, tile),
            **_activated(shape, tile),
            "KEEP": keep,
            "TRANSPOSED": shape.in_transposed,
            "PADDED": x.layout == "padded",
            **_sizes(tile, shape),
        },
        **_options(tile),
    )


def down_gemm(
    rows: Pointer,
    w: str,
    out: Pointer,
    shape: FusedShape,
    permutation: TokenPermutation,
    tile: TileConfig | HopperRows,
    *,
    backward: bool,
) -> Launch:
    """Multiply rows in the experts' order by `w_out`, or in backward by the transpose of `w_in`, to the tokens' order.

    `rows` are (R, H), in backward (R, 2H or H); `out` is (R, D). With `HopperRows` and more than one expert a token it
    stays in the experts' order.
    """
    k, n = (shape.pre_size if backward else shape.hidden_size), shape.token_size
    stored = (n, k) if backward else (k, n)
    transposed = backward ^ (shape.in_transposed if backward else shape.out_transposed)
    if isinstance(tile, HopperRows):
        sizes = (shape.num_pairs, shape.num_experts, k, n)
        places = permutation.pair_of_row if shape.top_k == 1 else None  # a pair is a token then
        return rows_launch(
            rows, Pointer(w), out, permutation.ends, *sizes, transposed, shape.dtype, shape.device, tile.tiles, places
        )
    tiles = permutation.tiles[tile.block_m]
    return Launch(
        down_gemm_kernel,
        _grid(tile, tiles.most, n, shape),
        {
            "a": Blocks(rows, (shape.num_pairs, k), (tile.block_m, tile.block_k)) if tile.tma else rows,
            "w": _matrices(w, stored, tile, shape, transposed=transposed, backward=backward),
            "out": out,
            **_tiled_rows(permutation, tile),
            "num_pairs": shape.num_pairs,
            "K": k,
            "N": n,
            "TRANSPOSED": transposed,
            "EVEN_K": k % tile.block_k == 0,
            "EVEN_N": n % tile.block_n == 0,
            **_sizes(tile, shape),
        },
        **_options(tile),
    )


def num_summands(hidden_size: int, tile: TileConfig | HopperTile) -> int:
    """The summands of a weight's gradient that `differentiate_hidden` writes: one for each tile of columns."""
    return -(-hidden_size // (tile.BLOCK_N if isinstance(tile, HopperTile) else tile.block_n))


def differentiate_hidden(
    grad: Operand,
    pre: Pointer,
    grad_pre: Pointer,
    hidden: Pointer,
    partial: Pointer,
    shape: FusedShape,
    permutation: TokenPermutation,
    tile: TileConfig | HopperTile,
) -> Launch:
    """Write the gradient of `pre`, the weighted activation (R, H), and summands of the weights' gradient (n, R)."""
    if isinstance(tile, HopperTile):
        return hopper.differentiate_hidden(grad, pre, grad_pre, hidden, partial, shape, permutation, tile)
    tiles = permutation.tiles[tile.block_m]
    transposed = not shape.out_transposed
    stored = (shape.hidden_size, shape.token_size)
    return Launch(
        differentiate_hidden_kernel,
        _grid(tile, tiles.most, shape.hidden_size, shape),
        {
            "grad_out": _rows_of(grad, tile),
            "w_out": _matrices("w_out", stored, tile, shape, transposed=transposed, backward=True),
            "pre": pre,
            "grad_pre": grad_pre,
            "hidden": hidden,
            "partial": partial,
            **_tiled_rows(permutation, tile),
            "num_pairs": shape.num_pairs,
            **_activated(shape, tile),
            "PARTS": tile.parts,
            "TRANSPOSED": transposed,
            "PADDED": grad.layout == "padded",
            **_sizes(tile, shape),
        },
        **_options(tile),
    )


def wgrad(
    a: Operand,
    b: Operand,
    out: Pointer,
    shape: FusedShape,
    permutation: TokenPermutation,
    tile: TileConfig | HopperSum,
) -> tuple[Launch, bool]:
    """Write, for each expert, the sum over its rows of a[row]^T b[row]: (E, M, N).

    One of them is of "rows", the other not; with `HopperSum` both are. Also returns whether the launch takes a
    `tile_counter`, which is called "counter".
    """
    if isinstance(tile, HopperSum):
        assert a.layout == b.layout == "rows", "the kernel itself puts the next expert's rows to zero"
        sizes = (a.num_rows, shape.num_experts, a.width, b.width)
        return weights_launch(
            a.pointer, b.pointer, out, permutation.ends, *sizes, shape.dtype, shape.device, tile.tiles
        )
    assert (a.layout == "rows") is not (b.layout == "rows"), "one side is zero behind an expert's last row"
    height = max(a.height, b.height)
    assert height == 1 or height % tile.block_k == 0, "whole blocks of padded rows"
    tiles = permutation.tiles[height] if height > 1 else next(iter(permutation.tiles.values()))
    launch = Launch(
        wgrad_kernel,
        _grid(tile, shape.num_experts * -(-a.width // tile.block_m), b.width, shape),
        {
            "a": _summed(a, tile, tile.block_m),
            "b": _summed(b, tile, tile.block_n),
            "out": out,
            "token_of_row": permutation.token_of_row,
            "ends": permutation.ends,
            "largest_first": permutation.largest_first,
            "first_tile": tiles.first,
            "E": shape.num_experts,
            "M": a.width,
            "N": b.width,
            "LAYOUT_A": a.layout,
            "LAYOUT_B": b.layout,
            "HEIGHT": height,
            "EVEN_M": a.width % tile.block_m == 0,
            "EVEN_N": b.width % tile.block_n == 0,
            **_sizes(tile, shape),
        },
        **_options(tile),
    )
    return launch, False


def _grid(tile: TileConfig, num_row_tiles: int, width: int, shape: FusedShape) -> tuple[int]:
    num_tiles = num_row_tiles * -(-width // tile.block_n)
    if not tile.per_multiprocessor:
        return (num_tiles,)
    multiprocessors = num_multiprocessors(shape.place) if shape.device >= 0 else _INTERPRETER_PROGRAMS
    return (min(num_tiles, multiprocessors * tile.per_multiprocessor),)


def _rows_of(operand: Operand, tile: TileConfig) -> Any:
    if operand.layout == "tokens":
        return operand.pointer
    assert operand.layout == "padded", "rows that are gathered, here or before"
    assert operand.height == tile.block_m, "a padded tile is a tile of the GEMM"
    return Blocks(operand.pointer, (operand.num_rows, operand.width), (tile.block_m, tile.block_k))


def _summed(operand: Operand, tile: TileConfig, width: int) -> Any:
    if operand.layout == "padded" or (tile.tma and operand.layout == "rows"):
        return Blocks(operand.pointer, (operand.num_rows, operand.width), (tile.block_k, width))
    return operand.pointer


def _matrices(
    name: str, sizes: tuple[int, int], tile: TileConfig, shape: FusedShape, *, transposed: bool, backward: bool = False
) -> Any:
    """The experts' matrices, of which each is `sizes`, or its transpose in memory.

    The kernel takes them as they lie, and `transposed` says how. In backward it multiplies by the transpose.
    """
    if not tile.tma:
        return Pointer(name)
    first, second = sizes if transposed is backward else sizes[::-1]
    block = (1, tile.block_n, tile.block_k) if transposed else (1, tile.block_k, tile.block_n)
    return Blocks(Pointer(name), (shape.num_experts, first, second), block)


def _tiled_rows(permutation: TokenPermutation, tile: TileConfig) -> dict[str, Any]:
    """The rows in the experts' order, and the tiles over them."""
    tiles = permutation.tiles[tile.block_m]
    return {
        "pair_of_row": permutation.pair_of_row,
        "tile_expert": tiles.expert,
        "tile_row": tiles.row,
        "num_tiles": tiles.count,
        "ends": permutation.ends,
    }


def _activated(shape: FusedShape, tile: TileConfig) -> dict[str, Any]:
    """What the GEMMs around the activation need to know, whose sums are over a token and whose columns are H."""
    return {
        "weights": Pointer("weights"),
        "D": shape.token_size,
        "H": shape.hidden_size,
        "TOP_K": shape.top_k,
        "GATED": shape.gated,
        "ACTIVATION": shape.activation,
        "EVEN_K": shape.token_size % tile.block_k == 0,
        "EVEN_N": shape.hidden_size % tile.block_n == 0,
    }


def _sizes(tile: TileConfig, shape: FusedShape) -> dict[str, Any]:
    return {
        "PRECISION": "ieee" if shape.dtype is torch.float32 else "tf32",
        "TMA": tile.tma,
        "FLATTEN": tile.flatten,
        "GROUP": tile.group,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
    }


def _options(tile: TileConfig) -> dict[str, int]:
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
