"""The token-expert pairs that experts with a capacity drop, under the routing that a request states."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from bexp.explorer.model.model import MoESpec
from bexp.explorer.model.routes import draw_batch_routes
from bexp.explorer.model.routing import RoutingSpec


@lru_cache(maxsize=512)
def dropped_share(moe: MoESpec, routing: RoutingSpec, num_tokens: int, seed: int) -> float:
    """Return the share of the token-expert pairs of `num_tokens` tokens that are over their expert's capacity.

    The routes are those of the measured reference layers. The choice of the dropped pairs depends on their weights, but
    their number does not, so no model is needed here.
    """
    if moe.capacity_factor is None:
        return 0.0
    drawn_TK = _drawn(moe, routing, num_tokens, seed)
    repeats, rest = divmod(num_tokens, drawn_TK.shape[0])
    counts_E = repeats * _count(drawn_TK, moe) + _count(drawn_TK[:rest], moe)
    return 1.0 - float(np.minimum(counts_E, moe.capacity(num_tokens)).sum()) / (num_tokens * moe.top_k)


def _count(routes_TK: npt.NDArray[np.int64], moe: MoESpec) -> npt.NDArray[np.int64]:
    return np.bincount(routes_TK.ravel(), minlength=moe.num_experts)


def _drawn(moe: MoESpec, routing: RoutingSpec, num_tokens: int, seed: int) -> npt.NDArray[np.int64]:
    return draw_batch_routes(moe.model_copy(update={"capacity_factor": None}), routing, num_tokens, seed)
