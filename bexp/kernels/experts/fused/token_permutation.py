"""Pairs in order of their experts, and the tiles over them: everything on the device, nothing waits for the host."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from bexp.kernels.experts.fused.kernels import routing

_BLOCK = 256
_CHUNK = 32
_TILES_AT_ONCE = 128
_GATHERED_AT_ONCE = 16
_ALIGNMENT = 4  # of four bytes: kernels are compiled for pointers to multiples of 16


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
class TokenPermutation:
    """Rows sorted by expert and then by token, all int32.

    `pair_of_row` and `token_of_row` (R,); `ends` (E,), the row behind each expert's last; `largest_first` (E,), experts
    by descending number of rows; `tiles`, by their height. All are views of `buffer`.
    """

    top_k: int
    buffer: Tensor
    pair_of_row: Tensor
    token_of_row: Tensor
    ends: Tensor
    largest_first: Tensor
    tiles: dict[int, Tiles]

    @classmethod
    def of(
        cls, buffer: Tensor, num_pairs: int, num_experts: int, top_k: int, heights: tuple[int, ...]
    ) -> TokenPermutation:
        """What lies in a buffer of `permutation_size` numbers."""
        sizes = _sizes(num_pairs, num_experts, heights)
        starts = accumulate((_aligned(size) for size in sizes), initial=0)
        views = iter([buffer[start : start + size] for start, size in zip(starts, sizes, strict=False)])
        pairs, tokens, ends, largest_first = next(views), next(views), next(views), next(views)
        tiles = {}
        for height in heights:
            expert, row, first, count = next(views), next(views), next(views), next(views)
            tiles[height] = Tiles(expert, row, first, count, most_tiles(num_pairs, num_experts, height))
        return cls(top_k, buffer, pairs, tokens, ends, largest_first, tiles)


def permutation_size(num_pairs: int, num_experts: int, heights: tuple[int, ...]) -> int:
    """How many int32 numbers a `TokenPermutation` takes."""
    return sum(map(_aligned, _sizes(num_pairs, num_experts, heights)))


def most_tiles(num_pairs: int, num_experts: int, height: int) -> int:
    """Tiles of that height over the rows of each expert, at most."""
    return (num_pairs + min(num_experts, num_pairs) * (height - 1)) // height


def permute_tokens(routes_TK: Tensor, num_experts: int, heights: tuple[int, ...]) -> TokenPermutation:
    """Sort the pairs of `routes_TK` (T, K) by expert and lay tiles of each of the heights over them."""
    num_pairs, top_k = routes_TK.numel(), routes_TK.shape[1]
    routes = routes_TK.contiguous()
    num_blocks = -(-num_pairs // _BLOCK)
    bins = _power_of_two(num_experts + 1)

    def indices(length: int) -> Tensor:
        return torch.empty(length, dtype=torch.int32, device=routes.device)

    permutation = TokenPermutation.of(
        indices(permutation_size(num_pairs, num_experts, heights)), num_pairs, num_experts, top_k, heights
    )
    counts = indices(num_experts * num_blocks)
    routing.count_experts[(num_blocks,)](routes, counts, num_pairs, num_blocks, num_experts, BLOCK=_BLOCK, BINS=bins)
    scan = torch.cumsum(counts, 0, dtype=torch.int32)
    routing.place_pairs[(num_blocks,)](
        routes,
        scan,
        permutation.pair_of_row,
        permutation.token_of_row,
        num_pairs,
        num_blocks,
        TOP_K=top_k,
        BLOCK=_BLOCK,
        CHUNK=_CHUNK,
    )
    for height, tiles in permutation.tiles.items():
        routing.lay_tiles[(num_experts,)](
            scan,
            permutation.ends,
            permutation.largest_first,
            tiles.first,
            tiles.expert,
            tiles.row,
            tiles.count,
            num_blocks,
            num_experts,
            BLOCK_M=height,
            BINS=bins,
            CHUNK=_TILES_AT_ONCE,
        )
    return permutation


def gather_tiles(tokens: Tensor, permutation: TokenPermutation, height: int) -> Tensor:
    """The tokens (T, D) of the rows, each expert's padded with zeros to whole tiles: (tiles * height, D)."""
    tiles, width = permutation.tiles[height], tokens.shape[1]
    out = tokens.new_empty(tiles.most * height, width)
    block_d = min(512, _power_of_two(width))
    block_r = min(16, height)
    routing.gather_tiles[(tiles.most * height // block_r,)](
        tokens,
        out,
        permutation.token_of_row,
        permutation.ends,
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


def gather_rows(tokens: Tensor, permutation: TokenPermutation) -> Tensor:
    """The tokens (T, D) of the rows, in the experts' order: (R, D)."""
    num_pairs, width = permutation.token_of_row.numel(), tokens.shape[1]
    out = tokens.new_empty(num_pairs, width)
    block_d = min(512, _power_of_two(width))
    grid = (-(-num_pairs // _GATHERED_AT_ONCE),)
    routing.gather_rows[grid](
        tokens, out, permutation.token_of_row, num_pairs, width, BLOCK_R=_GATHERED_AT_ONCE, BLOCK_D=block_d, num_warps=8
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


def _sizes(num_pairs: int, num_experts: int, heights: tuple[int, ...]) -> list[int]:
    sizes = [num_pairs, num_pairs, num_experts, num_experts]
    for height in heights:
        most = most_tiles(num_pairs, num_experts, height)
        sizes += [most, most, num_experts, 1]
    return sizes


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
