"""How each GEMM is divided into tiles."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache

from bexp.kernels.experts.fused.hopper_tiles import GATE_UP_GEMM, GRAD_HIDDEN, HopperRows, HopperSum, HopperTile
from bexp.kernels.experts.fused.layouts import Layout

HOPPER_ROWS = 96
"""From this many rows an expert the GEMMs with epilogues use Hopper's kernels; the sums over rows always use them."""
HOPPER_PRODUCT_ROWS = 256
"""From this many rows an expert the other products use them; at 128 rows they are level."""
HOPPER_EXPERTS = 512
"""The bounds of more experts than this do not fit the registers of the search for a tile."""


@dataclass(frozen=True)
class TileConfig:
    """One GEMM's tiles: output `block_m` x `block_n`, `block_k` of the sum at a time, `num_stages` of them in flight.

    `group` is the height of a band of tiles that run together. With `per_multiprocessor` programs on each
    multiprocessor a program takes several tiles; 0 starts one a tile. `tma` loads what is contiguous through tensor
    maps. `flatten` lets a program load its next tile before it has stored the last. `parts` cuts the columns of an
    epilogue that would need too many registers. With `copy` the tokens are gathered beforehand, by a kernel of its own,
    into padded tiles of that height, and the GEMM reads all through tensor maps.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int = 8
    per_multiprocessor: int = 0
    tma: bool = False
    flatten: bool = False
    parts: int = 1
    copy: int = 0

    @property
    def gathers(self) -> tuple[Layout, int]:
        """How the tokens that the GEMM reads lie, and the height of their tiles."""
        return ("padded", self.copy) if self.copy else ("tokens", 1)


@dataclass(frozen=True)
class FusedTiles:
    """The tiles of every GEMM of the FFN, forward and backward: of Triton kernels, or of those for Hopper."""

    gate_up_gemm: TileConfig | HopperTile
    down_gemm: TileConfig | HopperRows
    grad_hidden: TileConfig | HopperTile
    grad_input: TileConfig | HopperRows
    grad_w_in: TileConfig | HopperSum
    grad_w_out: TileConfig | HopperSum

    def heights(self, *, backward: bool) -> tuple[int, ...]:
        """The heights of the tiles of rows that the GEMMs take, and of the tiles that tokens are gathered into.

        There is at least one: the experts' ends are found with the tiles.
        """
        gemms: list[TileConfig | HopperTile | HopperRows] = [self.gate_up_gemm, self.down_gemm]
        if backward:
            gemms += [self.grad_hidden, self.grad_input]
        summed = [self.grad_w_in, self.grad_w_out] if backward else []
        heights = {tile.block_m for tile in gemms if isinstance(tile, TileConfig)}
        heights |= {tile.copy for tile in summed if isinstance(tile, TileConfig) and tile.copy}
        return tuple(sorted(heights or {HopperTile.ROWS}))

    def replaced(self, **tiles: TileConfig | HopperTile | HopperRows | HopperSum) -> FusedTiles:
        """A copy that has other tiles for some of the GEMMs."""
        return replace(self, **tiles)  # type: ignore[arg-type] # a field's type is that of its name


@lru_cache(maxsize=256)
def default_tiles(
    num_tokens: int, top_k: int, num_experts: int, gated: bool, itemsize: int, on_hopper: bool = False
) -> FusedTiles:
    """The tiles for `top_k` pairs a token over `num_experts` experts, by the mean of rows, which the host knows.

    The tiles of the Triton kernels are those that were fastest on an H200 at 1024, 128, 64 and 16 rows an expert.
    `on_hopper` allows Hopper's own kernels: they are faster at 64 and 128 rows, and level from 1024 rows on.
    """
    mean = num_tokens * top_k / num_experts
    if itemsize > 2:
        return FusedTiles(**{field.name: _SMALL for field in fields(FusedTiles)})
    tiles = _FEW if mean < 24 else _SOME if mean < 96 else _HUNDREDS if mean < 256 else _MANY
    if on_hopper and num_experts <= HOPPER_EXPERTS:
        products = mean >= HOPPER_PRODUCT_ROWS
        found = on_hopper_tiles(tiles, projections=mean >= HOPPER_ROWS, products=products)
        # With one expert a token there is no sum to save: forward is no faster than Triton's, backward is by 1 to 3%.
        return found if top_k > 1 else found.replaced(down_gemm=tiles.down_gemm)
    if gated or mean < 96:
        return tiles
    return tiles.replaced(gate_up_gemm=TileConfig(128, 256, 64, 8, 3, tma=True))


def on_hopper_tiles(tiles: FusedTiles, *, projections: bool = True, products: bool = True) -> FusedTiles:
    """`tiles` with the sums over rows on Hopper's own kernels.

    With `projections` the GEMMs that have epilogues are on them, too, and with `products` the two others. These then
    leave their rows in the experts' order, and the sums to tokens gather them at no cost.
    """
    tiles = tiles.replaced(grad_w_in=HopperSum(), grad_w_out=HopperSum())
    if products:
        tiles = tiles.replaced(down_gemm=HopperRows(), grad_input=HopperRows())
    if projections:
        return tiles.replaced(gate_up_gemm=GATE_UP_GEMM, grad_hidden=GRAD_HIDDEN)
    if isinstance(tiles.grad_hidden, TileConfig):  # what is gathered in tiles serves no sum any more
        return tiles.replaced(grad_hidden=replace(tiles.grad_hidden, copy=0))
    return tiles


_SMALL = TileConfig(32, 32, 32, 4, 2)
_MANY = FusedTiles(
    gate_up_gemm=TileConfig(128, 128, 64, 8, 4, tma=True),
    down_gemm=TileConfig(128, 256, 64, 8, 3, tma=True, flatten=True, per_multiprocessor=1),
    grad_hidden=TileConfig(128, 256, 64, 8, 4, tma=True, parts=4, copy=128),
    grad_input=TileConfig(128, 256, 64, 8, 3, tma=True),
    grad_w_in=TileConfig(128, 256, 64, 8, 5, tma=True),  # two stages more in flight: the tokens' indices come first
    grad_w_out=TileConfig(128, 256, 64, 8, 3, tma=True, copy=128),  # of what grad_hidden gathered
)
_HUNDREDS = _MANY.replaced(
    down_gemm=TileConfig(64, 128, 64, 4, 4, tma=True, flatten=True, per_multiprocessor=2),
    grad_input=TileConfig(64, 128, 64, 4, 4, tma=True, flatten=True, per_multiprocessor=2),
    grad_w_in=TileConfig(64, 128, 32, 4, 4, tma=True, copy=64),
    grad_w_out=TileConfig(64, 128, 32, 4, 4, tma=True, copy=128),
)
_SOME = _HUNDREDS.replaced(
    gate_up_gemm=TileConfig(64, 128, 64, 4, 4, tma=True),
    down_gemm=TileConfig(64, 256, 64, 4, 4, tma=True, flatten=True, per_multiprocessor=1),
    grad_hidden=TileConfig(64, 128, 64, 4, 4, tma=True, parts=2, copy=64),
    grad_input=TileConfig(64, 256, 64, 4, 4, tma=True, flatten=True, per_multiprocessor=1),
    grad_w_in=TileConfig(128, 128, 64, 4, 2, tma=True, per_multiprocessor=2, copy=64),
    grad_w_out=TileConfig(64, 128, 32, 4, 4, tma=True, copy=64),
)
_FEW = FusedTiles(
    gate_up_gemm=TileConfig(32, 128, 64, 4, 4, tma=True),
    down_gemm=TileConfig(32, 128, 64, 4, 4, tma=True),
    grad_hidden=TileConfig(16, 128, 64, 4, 4, tma=True, parts=2),
    grad_input=TileConfig(32, 128, 64, 4, 4, tma=True),
    grad_w_in=TileConfig(128, 128, 16, 4, 4, tma=True, copy=64),
    grad_w_out=TileConfig(64, 128, 32, 4, 4, tma=True, copy=64),
)
