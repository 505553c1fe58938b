"""Launches of the grouped GEMMs. Shapes are named as in `ExpertFFN`; R is T * K.

Tensors are contiguous; a weight may also be the transpose of a contiguous tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bexp.kernels.activations import Activation
from bexp.kernels.experts.fused.hopper import gemms as hopper
from bexp.kernels.experts.fused.hopper.tiles import HopperSum, HopperTile
from bexp.kernels.experts.fused.kernels.differentiate_hidden import differentiate_hidden_kernel
from bexp.kernels.experts.fused.kernels.down_gemm import down_gemm_kernel
from bexp.kernels.experts.fused.kernels.gate_up_gemm import gate_up_gemm_kernel
from bexp.kernels.experts.fused.kernels.wgrad import wgrad_kernel
from bexp.kernels.experts.fused.layouts import Operand
from bexp.kernels.experts.fused.tiles import TileConfig
from bexp.kernels.experts.fused.token_permutation import TokenPermutation
from bexp.kernels.experts.hopper.gemm import sum_over_rows
from bexp.kernels.experts.matrices import stored

_INTERPRETER_PROGRAMS = 3


def gate_up_gemm(
    x: Operand,
    weights_TK: Tensor,
    w_in: Tensor,
    hidden_size: int,
    activation: Activation,
    permutation: TokenPermutation,
    tile: TileConfig | HopperTile,
    *,
    keep: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the weighted activation (R, H) and, if `keep`, the input of the activation (R, 2H or H)."""
    if isinstance(tile, HopperTile):
        return hopper.gate_up_gemm(x, weights_TK, w_in, hidden_size, activation, permutation, tile, keep=keep)
    num_pairs, width = permutation.pair_of_row.numel(), w_in.shape[2]
    hidden = w_in.new_empty(num_pairs, hidden_size)
    pre = w_in.new_empty(num_pairs, width) if keep else None
    tiles = permutation.tiles[tile.block_m]
    matrices, transposed = stored(w_in)
    gate_up_gemm_kernel[_grid(tile, tiles.most, hidden_size, w_in.device)](
        _rows_of(x, tile),
        _matrices(matrices, tile, transposed=transposed),
        hidden if pre is None else pre,
        hidden,
        weights_TK,
        permutation.pair_of_row,
        tiles.expert,
        tiles.row,
        tiles.count,
        permutation.ends,
        w_in.shape[1],
        hidden_size,
        TOP_K=permutation.top_k,
        GATED=width == 2 * hidden_size,
        ACTIVATION=activation,
        KEEP=keep,
        TRANSPOSED=transposed,
        PADDED=x.layout == "padded",
        EVEN_K=w_in.shape[1] % tile.block_k == 0,
        EVEN_N=hidden_size % tile.block_n == 0,
        **_options(tile, w_in),
    )
    return hidden, pre


def down_gemm(
    rows: Tensor,
    w: Tensor,
    permutation: TokenPermutation,
    tile: TileConfig,
    *,
    transposed: bool,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply rows (R, K) in the experts' order by w (E, K, N), or (E, N, K) transposed; (R, N) in tokens' order."""
    num_pairs, k = rows.shape
    n = w.shape[1] if transposed else w.shape[2]
    matrices, lies_transposed = stored(w)
    transposed ^= lies_transposed
    out = rows.new_empty(num_pairs, n) if out is None else out
    tiles = permutation.tiles[tile.block_m]
    down_gemm_kernel[_grid(tile, tiles.most, n, rows.device)](
        _map(rows, (tile.block_m, tile.block_k)) if tile.tma else rows,
        _matrices(matrices, tile, transposed=transposed),
        out,
        permutation.pair_of_row,
        tiles.expert,
        tiles.row,
        tiles.count,
        permutation.ends,
        num_pairs,
        k,
        n,
        TRANSPOSED=transposed,
        EVEN_K=k % tile.block_k == 0,
        EVEN_N=n % tile.block_n == 0,
        **_options(tile, rows),
    )
    return out


def differentiate_hidden(
    grad: Operand,
    weights_TK: Tensor,
    pre: Tensor,
    w_out: Tensor,
    activation: Activation,
    permutation: TokenPermutation,
    tile: TileConfig | HopperTile,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of `pre`, the weighted activation (R, H), and summands of the weights' gradient (n, R)."""
    if isinstance(tile, HopperTile):
        return hopper.differentiate_hidden(grad, weights_TK, pre, w_out, activation, permutation, tile)
    num_pairs, hidden_size = permutation.pair_of_row.numel(), w_out.shape[1]
    grad_pre, hidden = torch.empty_like(pre), pre.new_empty(num_pairs, hidden_size)
    columns = -(-hidden_size // tile.block_n)
    partial = torch.empty(columns, num_pairs, dtype=torch.float32, device=pre.device)
    tiles = permutation.tiles[tile.block_m]
    matrices, lies_transposed = stored(w_out)
    differentiate_hidden_kernel[_grid(tile, tiles.most, hidden_size, pre.device)](
        _rows_of(grad, tile),
        _matrices(matrices, tile, transposed=not lies_transposed),
        pre,
        grad_pre,
        hidden,
        weights_TK,
        partial,
        permutation.pair_of_row,
        tiles.expert,
        tiles.row,
        tiles.count,
        permutation.ends,
        num_pairs,
        w_out.shape[2],
        hidden_size,
        TOP_K=permutation.top_k,
        GATED=pre.shape[1] == 2 * hidden_size,
        ACTIVATION=activation,
        PARTS=tile.parts,
        TRANSPOSED=not lies_transposed,
        PADDED=grad.layout == "padded",
        EVEN_K=w_out.shape[2] % tile.block_k == 0,
        EVEN_N=hidden_size % tile.block_n == 0,
        **_options(tile, w_out),
    )
    return grad_pre, hidden, partial


def wgrad(a: Operand, b: Operand, permutation: TokenPermutation, tile: TileConfig | HopperSum) -> Tensor:
    """Return, for each expert, the sum over its rows of a[row]^T b[row]: (E, M, N).

    One of them is of "rows", the other not; with `HopperSum` both are.
    """
    if isinstance(tile, HopperSum):
        assert a.layout == b.layout == "rows", "the kernel itself puts the next expert's rows to zero"
        return sum_over_rows(a.tensor, b.tensor, permutation.ends, tiles=tile.tiles)
    assert (a.layout == "rows") is not (b.layout == "rows"), "one side is zero behind an expert's last row"
    height = max(a.height, b.height)
    assert height == 1 or height % tile.block_k == 0, "whole blocks of padded rows"
    num_experts, m, n = permutation.ends.numel(), a.tensor.shape[1], b.tensor.shape[1]
    out = a.tensor.new_empty(num_experts, m, n)
    tiles = permutation.tiles[height] if height > 1 else next(iter(permutation.tiles.values()))
    wgrad_kernel[_grid(tile, num_experts * -(-m // tile.block_m), n, out.device)](
        _summed(a, tile, tile.block_m),
        _summed(b, tile, tile.block_n),
        out,
        permutation.token_of_row,
        permutation.ends,
        permutation.largest_first,
        tiles.first,
        num_experts,
        m,
        n,
        LAYOUT_A=a.layout,
        LAYOUT_B=b.layout,
        HEIGHT=height,
        EVEN_M=m % tile.block_m == 0,
        EVEN_N=n % tile.block_n == 0,
        **_options(tile, out),
    )
    return out


def _grid(tile: TileConfig, num_row_tiles: int, width: int, device: torch.device) -> tuple[int]:
    num_tiles = num_row_tiles * -(-width // tile.block_n)
    if not tile.per_multiprocessor:
        return (num_tiles,)
    multiprocessors = (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else _INTERPRETER_PROGRAMS
    )
    return (min(num_tiles, multiprocessors * tile.per_multiprocessor),)


def _rows_of(operand: Operand, tile: TileConfig) -> Any:
    if operand.layout == "tokens":
        return operand.tensor
    assert operand.layout == "padded", "rows that are gathered, here or before"
    assert operand.height == tile.block_m, "a padded tile is a tile of the GEMM"
    return _map(operand.tensor, (tile.block_m, tile.block_k))


def _summed(operand: Operand, tile: TileConfig, width: int) -> Any:
    if operand.layout == "padded" or (tile.tma and operand.layout == "rows"):
        return _map(operand.tensor, (tile.block_k, width))
    return operand.tensor


def _matrices(matrices: Tensor, tile: TileConfig, *, transposed: bool) -> Any:
    if not tile.tma:
        return matrices
    return _map(matrices, (1, tile.block_n, tile.block_k) if transposed else (1, tile.block_k, tile.block_n))


def _map(tensor: Tensor, block: tuple[int, ...]) -> Any:
    return TensorDescriptor.from_tensor(tensor, list(block))


def _options(tile: TileConfig, like: Tensor) -> dict[str, Any]:
    return {
        "PRECISION": "ieee" if like.dtype is torch.float32 else "tf32",
        "TMA": tile.tma,
        "FLATTEN": tile.flatten,
        "GROUP": tile.group,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
