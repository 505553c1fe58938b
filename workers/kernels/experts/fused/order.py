"""Pairs in order of their experts, and the tiles over them: everything on the device, nothing waits for the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.kernels.experts.fused.kernels import routing

_BLOCK = 256
_CHUNK = 32
_TILES_AT_ONCE = 128


@dataclass(frozen=True)
class Tiles:
    """Tiles of some height: of each its expert and first row; each expert's first tile; in one element, their number.

    There are at most `most`.
    """

    expert: Tensor
    row: Tensor
    first: Tensor
    count: Tensor
    most: int


@dataclass(frozen=True)
class Order:
    """Rows sorted by expert and then by token, all int32.

    `pair_of_row` and `token_of_row` (R,); `ends` (E,), the row behind each expert's last; `largest_first` (E,), experts
    by descending number of rows; `tiles`, by their height.
    """

    top_k: int
    pair_of_row: Tensor
    token_of_row: Tensor
    ends: Tensor
    largest_first: Tensor
    tiles: dict[int, Tiles]


def order_pairs(routes_TK: Tensor, num_experts: int, heights: tuple[int, ...]) -> Order:
    """Sort the pairs of `routes_TK` (T, K) by expert and lay tiles of each of the heights over them."""
    num_pairs, top_k = routes_TK.numel(), routes_TK.shape[1]
    routes = routes_TK.contiguous()
    num_blocks = -(-num_pairs // _BLOCK)
    bins = _power_of_two(num_experts + 1)

    def indices(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=routes.device)

    counts = indices(num_experts * num_blocks)
    routing.count_experts[(num_blocks,)](routes, counts, num_pairs, num_blocks, num_experts, BLOCK=_BLOCK, BINS=bins)
    scan = torch.cumsum(counts, 0, dtype=torch.int32)
    pair_of_row, token_of_row = indices(2, num_pairs)
    routing.place_pairs[(num_blocks,)](
        routes, scan, pair_of_row, token_of_row, num_pairs, num_blocks, TOP_K=top_k, BLOCK=_BLOCK, CHUNK=_CHUNK
    )
    ends, largest_first = indices(2, num_experts)
    tiles: dict[int, Tiles] = {}
    for height in sorted(set(heights)):
        most = (num_pairs + min(num_experts, num_pairs) * (height - 1)) // height
        expert, row, first, count = indices(2 * most + num_experts + 1).split((most, most, num_experts, 1))
        tiles[height] = Tiles(expert, row, first, count, most)
        routing.lay_tiles[(num_experts,)](
            scan,
            ends,
            largest_first,
            first,
            expert,
            row,
            count,
            num_blocks,
            num_experts,
            BLOCK_M=height,
            BINS=bins,
            CHUNK=_TILES_AT_ONCE,
        )
    return Order(top_k, pair_of_row, token_of_row, ends, largest_first, tiles)


def gather_tiles(tokens: Tensor, order: Order, height: int) -> Tensor:
    """The tokens (T, D) of the rows, each expert's padded with zeros to whole tiles: (tiles * height, D)."""
    tiles, width = order.tiles[height], tokens.shape[1]
    out = tokens.new_empty(tiles.most * height, width)
    block_d = min(512, _power_of_two(width))
    block_r = min(16, height)
    routing.gather_tiles[(tiles.most * height // block_r,)](
        tokens,
        out,
        order.token_of_row,
        order.ends,
        tiles.expert,
        tiles.row,
        tiles.count,
        width,
        HEIGHT=height,
        BLOCK_R=block_r,
        BLOCK_D=block_d,
        num_warps=8,
    )
    return out


def sum_pairs(rows: Tensor, top_k: int) -> Tensor:
    """Rows (T * K, D) in the tokens' order to their sums (T, D)."""
    if top_k == 1:
        return rows
    num_pairs, width = rows.shape
    out = rows.new_empty(num_pairs // top_k, width)
    block_d = min(1024, _power_of_two(width))
    block_t = max(1, 4096 // block_d)
    grid = (-(-out.shape[0] // block_t), -(-width // block_d))
    routing.sum_pairs[grid](rows, out, num_pairs, width, TOP_K=top_k, BLOCK_T=block_t, BLOCK_D=block_d, num_warps=8)
    return out


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
