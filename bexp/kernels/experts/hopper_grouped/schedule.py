"""Finds the tile that a program works on. Each partition of a Hopper kernel does this. Imports Triton's Gluon.

Every warp holds the bounds or places of all experts in registers, so that a search is a few reductions within a warp.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl

from bexp.kernels.experts.hopper_grouped.pipeline import jit


@jit
def _add(a: gl.tensor, b: gl.tensor) -> gl.tensor:
    return a + b


@jit
def expert_tiles(
    ends: gl.tensor, num_experts: gl.tensor, BLOCK_M: gl.constexpr, EXPERTS: gl.constexpr
) -> tuple[gl.tensor, gl.tensor]:
    """The experts' ends (EXPERTS,), and how many row tiles lie before each end; EXPERTS >= num_experts."""
    layout: gl.constexpr = gl.BlockedLayout([EXPERTS // 32], [32], [gl.num_warps()], [0])
    experts = gl.arange(0, EXPERTS, layout)
    exists = experts < num_experts
    end_E = gl.load(ends + experts, mask=exists, other=0x7FFFFFFF)
    start_E = gl.load(ends + experts - 1, mask=exists & (experts > 0), other=0)
    tiles_E = gl.where(exists, (end_E - start_E + BLOCK_M - 1) // BLOCK_M, 0)
    return end_E, gl.associative_scan(tiles_E, 0, _add)


@jit
def row_tiles(
    ends: gl.tensor,
    num_experts: gl.tensor,
    N: gl.tensor,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    EXPERTS: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """What `expert_tiles` finds, the tiles beside each other in N columns, and how many tiles there are."""
    end_E, tiles_E = expert_tiles(ends, num_experts, BLOCK_M, EXPERTS)
    tiles_n = gl.cdiv(N, BLOCK_N)
    return end_E, tiles_E, tiles_n, gl.max(tiles_E, 0) * tiles_n


@jit
def grouped_order(
    tile: gl.tensor, tiles_m: gl.tensor, tiles_n: gl.tensor, GROUP_M: gl.constexpr
) -> tuple[gl.tensor, gl.tensor]:
    """The row and column of a tile when columns of GROUP_M tiles are walked one after the other."""
    strip = tile // (GROUP_M * tiles_n)
    first_m = strip * GROUP_M
    height = gl.minimum(tiles_m - first_m, GROUP_M)
    inside = tile - strip * (GROUP_M * tiles_n)
    return first_m + inside % height, inside // height


@jit
def find_rows_tile(
    tile: gl.tensor,
    end_E: gl.tensor,
    tiles_E: gl.tensor,
    tiles_n: gl.tensor,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    GROUP_M: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Expert, first row, the expert's end and first column of a tile, from what `expert_tiles` found."""
    before = tiles_E * tiles_n <= tile
    expert = gl.sum(before.to(gl.int32), 0)
    first = gl.max(gl.where(before, tiles_E, 0), 0)
    start = gl.max(gl.where(before, end_E, 0), 0)
    end = gl.min(gl.where(before, 0x7FFFFFFF, end_E), 0)
    tiles_m = (end - start + BLOCK_M - 1) // BLOCK_M
    tile_m, tile_n = grouped_order(tile - first * tiles_n, tiles_m, tiles_n, GROUP_M)
    return expert, start + tile_m * BLOCK_M, end, tile_n * BLOCK_N


@jit
def heaviest_first(ends: gl.tensor, num_experts: gl.tensor, EXPERTS: gl.constexpr) -> gl.tensor:
    """Each expert's place (EXPERTS,) among all, by falling rows up to a factor of two; -1 where there is no expert.

    Experts with more than half of the most rows come first, then those with more than a quarter, and so on; experts of
    a class keep their order. One scan counts all classes, ten bits each: EXPERTS <= 512.
    """
    layout: gl.constexpr = gl.BlockedLayout([EXPERTS // 32], [32], [gl.num_warps()], [0])
    gl.static_assert(EXPERTS <= 512)
    experts = gl.arange(0, EXPERTS, layout)
    exists = experts < num_experts
    end_E = gl.load(ends + experts, mask=exists, other=0)
    start_E = gl.load(ends + experts - 1, mask=exists & (experts > 0), other=0)
    most = gl.max(end_E - start_E, 0)
    class_E = gl.zeros_like(experts)
    for halvings in gl.static_range(1, 6):
        class_E += (end_E - start_E <= (most >> halvings)).to(gl.int32)
    place_E = experts
    if gl.max(gl.where(exists, class_E, 0), 0) > 0:
        shift_E = (class_E * 10).to(gl.int64)
        one_E = gl.where(exists, gl.full_like(shift_E, 1) << shift_E, gl.zeros_like(shift_E))
        counted_E = gl.associative_scan(one_E, 0, _add)
        counted = gl.max(counted_E, 0)
        place_E = ((counted_E >> shift_E) & 1023).to(gl.int32) - 1
        for heavier in gl.static_range(5):
            place_E += gl.where(class_E > heavier, ((counted >> (10 * heavier)) & 1023).to(gl.int32), 0)
    return gl.where(exists, place_E, -1)


@jit
def expert_at(place: gl.tensor, place_E: gl.tensor, num_experts: gl.tensor) -> gl.tensor:
    """The expert whose place this is; num_experts or more behind the last."""
    layout: gl.constexpr = place_E.type.layout
    experts = gl.arange(0, place_E.shape[0], layout)
    found = gl.sum(gl.where(place_E == place, experts, 0), 0)
    return gl.where(place < num_experts, found, place)


@jit
def find_weights_tile(
    tile: gl.tensor,
    place_E: gl.tensor,
    ends: gl.tensor,
    num_experts: gl.tensor,
    tiles_m: gl.tensor,
    tiles_n: gl.tensor,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    GROUP_M: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Expert, its first row and its end, and the first row and column of a tile of its matrix.

    The experts come in the order of `place_E`, or, if that is None, in their own. Behind the last tile the expert is
    num_experts or more, and has no rows.
    """
    tiles = tiles_m * tiles_n
    expert = tile // tiles
    tile_m, tile_n = grouped_order(tile - expert * tiles, tiles_m, tiles_n, GROUP_M)
    if place_E is not None:
        expert = expert_at(expert, place_E, num_experts)
    exists = expert < num_experts
    end = gl.load(ends + expert, mask=exists, other=0)
    start = gl.load(ends + expert - 1, mask=exists & (expert > 0), other=0)
    return expert, start, end, tile_m * BLOCK_M, tile_n * BLOCK_N
