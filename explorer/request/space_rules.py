"""Rules about the space of candidates: it is not empty, and it is small enough to be enumerated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bexp.explorer.dimensions.micro_batch_size import MAX_MICRO_BATCH_SIZE, divisors, nearest_sizes
from bexp.explorer.model.base import RuleError

if TYPE_CHECKING:
    from bexp.explorer.request.request import ExplorationRequest

MAX_COMBINATIONS = 3072
"""The most combinations of micro-batch, tile and recomputation; back ends multiply them by about ten."""

MAX_SHARED_COMBINATIONS = 2 * MAX_COMBINATIONS
"""The same limit with context parallelism and sharding counted in."""


def check_largest_tile(request: ExplorationRequest) -> None:
    """The cap on tiles divides a stated batch."""
    largest = request.bta.max_tile
    if largest is not None and request.batch_size is not None and request.batch_size % largest:
        message = f"bta.max_tile ({largest}) must divide batch_size ({request.batch_size})"
        raise RuleError(message, "bta.max_tile", "batch_size")


def check_micro_batch_sizes(request: ExplorationRequest) -> None:
    """At least one micro-batch size is left: one size with a stated batch divides what a device gets of it."""
    if request.space.micro_batch_sizes:
        return
    size = max(request.devices.context_parallel_sizes)
    who = "each device" if size == 1 else f"each group of {size} devices"
    share, asked = request.effective_batch_size // request.devices.data_parallel_size(size), request.micro_batch_choice
    legal = [size for size in divisors(share) if size <= MAX_MICRO_BATCH_SIZE]
    nearest = nearest_sizes(asked, legal) if isinstance(asked, int) else ()
    raise RuleError(
        f"micro_batch_size ({asked}) does not divide what {who} gets of the batch: {share} sequences of batch_size "
        f"({request.batch_size}) over num_devices ({request.num_devices}); the nearest that divide it: "
        f"{' and '.join(map(str, nearest))}. A list or a range is independent of the batch",
        "micro_batch_size",
        "batch_size",
        "num_devices",
    )


def check_tiles(request: ExplorationRequest) -> None:
    """At least one tile is left, and each listed tile divides a micro-batch size."""
    tiles = {tile for m in request.space.micro_batch_sizes for tile in request.space.tiles_for(m)}
    if not tiles:
        raise RuleError("bta leaves no tile: none of bta.tiles divides a micro-batch size of the space", "bta")
    unused = [tile for tile in request.bta.tiles or () if tile not in tiles]
    if unused:
        message = f"bta.tiles: {unused[0]} is no factor of any micro-batch size of the space"
        raise RuleError(message, "bta.tiles", "micro_batch_size")


def check_combinations(request: ExplorationRequest) -> None:
    """Some recomputation policy can be combined with the tiles, and the space is small enough to be enumerated."""
    combinations = _count_combinations(request)
    if combinations == 0:
        named = "' and '".join(request.space.recompute_policies)
        raise RuleError(
            f"bta.enable with recompute '{named}' alone leaves nothing: a tile recomputes its attention already",
            "bta.enable",
            "recompute",
        )
    if combinations > MAX_COMBINATIONS:
        raise RuleError(
            f"the space has {combinations} combinations of micro-batch size, tile and recomputation; "
            f"at most {MAX_COMBINATIONS} are explored: restrict one of them"
        )
    ways, levels = len(request.space.sharings), len(request.space.sharding_choices)
    shared = combinations * ways * levels
    if shared > max(MAX_SHARED_COMBINATIONS, combinations):
        raise RuleError(
            f"context_parallel and sharding: with {ways} pairs of a size and a layout and {levels} levels of "
            f"sharding the space has {shared} combinations; at most {MAX_SHARED_COMBINATIONS} are explored: "
            "restrict sizes, layouts, sharding_levels, micro_batch_size, bta or recompute"
        )


def _count_combinations(request: ExplorationRequest) -> int:
    """Return the number of combinations of micro-batch, tile and recomputation."""
    space = request.space
    tilings = [tile is not None for m in space.micro_batch_sizes for tile in space.tiles_for(m)]
    tiled = sum(tilings)
    untiled = len(tilings) - tiled
    return (untiled and untiled * len(space.policies_for(None))) + (tiled and tiled * len(space.policies_for(1)))
