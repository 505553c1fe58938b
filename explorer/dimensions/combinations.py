"""The number of candidates that a request may ask for, before a device is asked."""

from __future__ import annotations

from bexp.explorer.dimensions.bta_tile import BTA_TILE
from bexp.explorer.dimensions.context_parallel import CONTEXT_PARALLEL
from bexp.explorer.dimensions.micro_batch_size import MICRO_BATCH_SIZE
from bexp.explorer.dimensions.place import Place
from bexp.explorer.dimensions.recompute import RECOMPUTE
from bexp.explorer.dimensions.sharding import SHARDING
from bexp.explorer.model.base import RuleError

MAX_COMBINATIONS = 3072
"""The most combinations of micro-batch, tile and recomputation; back ends multiply them by about ten."""

MAX_SHARED_COMBINATIONS = 2 * MAX_COMBINATIONS
"""The same limit with context parallelism and sharding counted in."""


def check_combinations(place: Place) -> None:
    """Check that some recomputation policy goes with the tiles, and that the space is small enough to be enumerated."""
    combinations = _count_combinations(place)
    if combinations == 0:
        named = "' and '".join(RECOMPUTE.considered(place))
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
    ways, levels = len(CONTEXT_PARALLEL.considered(place)), len(SHARDING.considered(place))
    shared = combinations * ways * levels
    if shared > max(MAX_SHARED_COMBINATIONS, combinations):
        raise RuleError(
            f"context_parallel and sharding: with {ways} pairs of a size and a layout and {levels} levels of "
            f"sharding the space has {shared} combinations; at most {MAX_SHARED_COMBINATIONS} are explored: "
            "restrict sizes, layouts, sharding_levels, micro_batch_size, bta or recompute"
        )


def _count_combinations(place: Place) -> int:
    """Return the number of combinations of micro-batch, tile and recomputation."""
    sizes, policies = MICRO_BATCH_SIZE.considered(place), RECOMPUTE.considered(place)
    tilings = [tile is not None for m in sizes for tile in BTA_TILE.considered_for(m, place)]
    if not tilings:
        return 0
    tiled = sum(tilings)
    num_tiled = len([policy for policy in policies if not policy.untiled_only])
    return (len(tilings) - tiled) * len(policies) + tiled * num_tiled
