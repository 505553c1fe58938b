"""Pairs in order of their experts, and the tiles over them: everything on the device, nothing waits for the host."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from bexp.kernels.allocation import empty
from bexp.kernels.experts.fused import routing
from bexp.kernels.experts.fused.layouts import FusedShape, Operand
from bexp.kernels.launcher import Launch, Launches, Pointer

FEW_PAIRS = 4096
"""Up to this many pairs one launch does it all: each program looks at all pairs. More are sorted by counting."""
_BLOCK = 256
_CHUNK = 32
_FEW_AT_ONCE = 16
_FEW_CHUNK = 512
_TILES_AT_ONCE = 128
_GATHERED_AT_ONCE = 16
_ALIGNMENT = 4  # of four bytes: kernels are compiled for pointers to multiples of 16


@dataclass(frozen=True)
class Tiles:
    """Tiles of some height: of each its expert and first row; each expert's first tile; in one element, their number.

    There are at most `most`.
    """

    expert: Pointer
    row: Pointer
    first: Pointer
    count: Pointer
    most: int


@dataclass(frozen=True)
class TokenPermutation:
    """Where the parts of a permutation lie in its buffer: rows sorted by expert and then by token, all int32.

    `pair_of_row`, `token_of_row` and `row_of_pair` (R,); `ends` (E,), the row behind each expert's last;
    `largest_first` (E,), experts by descending number of rows; `tiles`, by their height.
    """

    pair_of_row: Pointer
    token_of_row: Pointer
    row_of_pair: Pointer
    ends: Pointer
    largest_first: Pointer
    tiles: dict[int, Tiles]

    @classmethod
    def of(cls, num_pairs: int, num_experts: int, heights: tuple[int, ...]) -> TokenPermutation:
        """The parts of a buffer of `permutation_size` numbers, which is called "permutation"."""
        starts = accumulate((_aligned(size) for size in _sizes(num_pairs, num_experts, heights)), initial=0)
        parts = iter([Pointer("permutation", start * torch.int32.itemsize) for start in starts])
        pairs, tokens, rows, ends, largest_first = (next(parts) for _ in range(5))
        tiles = {}
        for height in heights:
            expert, row, first, count = next(parts), next(parts), next(parts), next(parts)
            tiles[height] = Tiles(expert, row, first, count, most_tiles(num_pairs, num_experts, height))
        return cls(pairs, tokens, rows, ends, largest_first, tiles)


def permutation_size(num_pairs: int, num_experts: int, heights: tuple[int, ...]) -> int:
    """How many int32 numbers a `TokenPermutation` takes."""
    return sum(map(_aligned, _sizes(num_pairs, num_experts, heights)))


def most_tiles(num_pairs: int, num_experts: int, height: int) -> int:
    """Tiles of that height over the rows of each expert, at most."""
    return (num_pairs + min(num_experts, num_pairs) * (height - 1)) // height


def permute_tokens(num_pairs: int, num_experts: int, top_k: int, permutation: TokenPermutation) -> Launch | Sort:
    """What sorts the pairs of "routes" (T, K) by expert and lays tiles over them: one launch if there are few pairs."""
    if num_pairs <= FEW_PAIRS and len(permutation.tiles) <= 2:
        return _permute_few(num_pairs, num_experts, top_k, permutation)
    return Sort(num_pairs, num_experts, top_k, permutation)


def _permute_few(num_pairs: int, num_experts: int, top_k: int, permutation: TokenPermutation) -> Launch:
    heights = tuple(permutation.tiles)
    first, second = permutation.tiles[heights[0]], permutation.tiles[heights[-1]]
    return Launch(
        routing.permute_few,
        (num_experts + -(-num_pairs // _FEW_AT_ONCE),),
        {
            "routes": Pointer("routes"),
            "pair_of_row": permutation.pair_of_row,
            "token_of_row": permutation.token_of_row,
            "row_of_pair": permutation.row_of_pair,
            "ends": permutation.ends,
            "largest_first": permutation.largest_first,
            "first_tile": first.first,
            "tile_expert": first.expert,
            "tile_row": first.row,
            "num_tiles": first.count,
            "other_first_tile": second.first,
            "other_tile_expert": second.expert,
            "other_tile_row": second.row,
            "other_num_tiles": second.count,
            "num_pairs": num_pairs,
            "E": num_experts,
            "TOP_K": top_k,
            "HEIGHT": heights[0],
            "OTHER_HEIGHT": heights[1] if len(heights) > 1 else 0,
            "BLOCK": _FEW_AT_ONCE,
            "CHUNK": _FEW_CHUNK,
            "BINS": _power_of_two(num_experts + 1),
            "TILES": _TILES_AT_ONCE,
        },
    )


class Sort:
    """A stable counting sort in a launch a step, for many pairs."""

    def __init__(self, num_pairs: int, num_experts: int, top_k: int, permutation: TokenPermutation) -> None:
        num_blocks = -(-num_pairs // _BLOCK)
        self._num_counts = num_experts * num_blocks
        bins = _power_of_two(num_experts + 1)
        routes = Pointer("routes")
        count = Launch(
            routing.count_experts,
            (num_blocks,),
            {
                "routes": routes,
                "counts": Pointer("counts"),
                "num_pairs": num_pairs,
                "num_blocks": num_blocks,
                "E": num_experts,
                "BLOCK": _BLOCK,
                "BINS": bins,
            },
        )
        place = Launch(
            routing.place_pairs,
            (num_blocks,),
            {
                "routes": routes,
                "scan": Pointer("scan"),
                "pair_of_row": permutation.pair_of_row,
                "token_of_row": permutation.token_of_row,
                "row_of_pair": permutation.row_of_pair,
                "num_pairs": num_pairs,
                "num_blocks": num_blocks,
                "TOP_K": top_k,
                "BLOCK": _BLOCK,
                "CHUNK": _CHUNK,
            },
        )
        lay = [
            Launch(
                routing.lay_tiles,
                (num_experts,),
                {
                    "scan": Pointer("scan"),
                    "ends": permutation.ends,
                    "largest_first": permutation.largest_first,
                    "first_tile": tiles.first,
                    "tile_expert": tiles.expert,
                    "tile_row": tiles.row,
                    "num_tiles": tiles.count,
                    "num_blocks": num_blocks,
                    "E": num_experts,
                    "BLOCK_M": height,
                    "BINS": bins,
                    "CHUNK": _TILES_AT_ONCE,
                },
            )
            for height, tiles in permutation.tiles.items()
        ]
        self._count = Launches(("routes", "counts"), (count,))
        self._place = Launches(("routes", "scan", "permutation"), (place, *lay))

    def __call__(self, stream: int, routes: Tensor, permutation: Tensor) -> None:
        """Sort the pairs of `routes` on `stream`, into the permutation's buffer."""
        counts = empty(routes, (self._num_counts,), (1,), torch.int32)
        self._count(stream, routes, counts)
        scan = torch.cumsum(counts, 0, dtype=torch.int32)
        self._place(stream, routes, scan, permutation)


def gather_tiles(tokens: str, out: Operand, permutation: TokenPermutation) -> Launch:
    """Copy the tokens (T, D) of the rows, each expert's padded with zeros to whole tiles of the operand's height."""
    tiles = permutation.tiles[out.height]
    block_r = min(16, out.height)
    return Launch(
        routing.gather_tiles,
        (out.num_rows // block_r,),
        {
            "tokens": Pointer(tokens),
            "out": out.pointer,
            "token_of_row": permutation.token_of_row,
            "ends": permutation.ends,
            "tile_expert": tiles.expert,
            "tile_row": tiles.row,
            "num_tiles": tiles.count,
            "D": out.width,
            "HEIGHT": out.height,
            "BLOCK_R": block_r,
            "BLOCK_D": min(512, _power_of_two(out.width)),
        },
        num_warps=8,
    )


def gather_rows(
    tokens: str,
    out: Operand,
    permutation: TokenPermutation,
    other_tokens: str | None = None,
    other_out: Operand | None = None,
) -> Launch:
    """Copy the tokens (T, D) of the rows to (R, D), in the experts' order; those of another tensor too, if given."""
    return Launch(
        routing.gather_rows,
        (-(-out.num_rows // _GATHERED_AT_ONCE), 1 if other_out is None else 2),
        {
            "tokens": Pointer(tokens),
            "other_tokens": Pointer(other_tokens or tokens),
            "out": out.pointer,
            "other_out": out.pointer if other_out is None else other_out.pointer,
            "token_of_row": permutation.token_of_row,
            "num_pairs": out.num_rows,
            "D": out.width,
            "BLOCK_R": _GATHERED_AT_ONCE,
            "BLOCK_D": min(512, _power_of_two(out.width)),
        },
        num_warps=8,
    )


def sum_pairs(
    rows: Pointer, out: Pointer, shape: FusedShape, permutation: TokenPermutation, *, by_expert: bool
) -> Launch:
    """Sum each token's rows: (T * K, D) in the tokens' order, or in the experts' if `by_expert`, to (T, D)."""
    block_d, block_t = _summed_block(shape)
    return Launch(
        routing.sum_pairs,
        (-(-shape.num_tokens // block_t) * -(-shape.token_size // block_d),),
        {
            "rows": rows,
            "row_of_pair": permutation.row_of_pair,
            "out": out,
            "num_pairs": shape.num_pairs,
            "D": shape.token_size,
            "TOP_K": shape.top_k,
            "BY_EXPERT": by_expert,
            "BLOCK_T": block_t,
            "BLOCK_D": block_d,
        },
        num_warps=8,
    )


def finish_backward(
    rows: Pointer,
    grad_x: Pointer,
    partial: Pointer,
    grad_weights: Pointer,
    num_summands: int,
    shape: FusedShape,
    permutation: TokenPermutation,
    *,
    by_expert: bool,
    sums_rows: bool,
    sums_partial: bool,
) -> Launch:
    """Sum each token's rows as `sum_pairs` does, and `partial` (n, R) to the gradient of the routing weights."""
    block_d, block_t = _summed_block(shape)
    row_programs = -(-shape.num_tokens // block_t) * -(-shape.token_size // block_d) if sums_rows else 0
    weight_programs = -(-shape.num_pairs // _BLOCK) if sums_partial else 0
    return Launch(
        routing.finish_backward,
        (row_programs + weight_programs,),
        {
            "rows": rows,
            "row_of_pair": permutation.row_of_pair,
            "grad_x": grad_x,
            "partial": partial,
            "grad_weights": grad_weights,
            "num_pairs": shape.num_pairs,
            "num_blocks": weight_programs,
            "D": shape.token_size,
            "SUMMANDS": num_summands,
            "TOP_K": shape.top_k,
            "BY_EXPERT": by_expert,
            "BLOCK_T": block_t,
            "BLOCK_D": block_d,
            "BLOCK": _BLOCK,
        },
        num_warps=8,
    )


def _summed_block(shape: FusedShape) -> tuple[int, int]:
    block_d = min(1024, _power_of_two(shape.token_size))
    return block_d, max(1, 4096 // block_d)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _sizes(num_pairs: int, num_experts: int, heights: tuple[int, ...]) -> list[int]:
    sizes = [num_pairs, num_pairs, num_pairs, num_experts, num_experts]
    for height in heights:
        most = most_tiles(num_pairs, num_experts, height)
        sizes += [most, most, num_experts, 1]
    return sizes


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
