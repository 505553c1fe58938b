"""Routes on a device: drawn once for a number of tokens, used by every expert block."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from explorer.spec.model import ModelSpec, MoESpec
from explorer.spec.routes import draw_routes
from explorer.spec.routing import RoutingSpec

_MIN_DRAWN_TOKENS = 1 << 12
_MAX_DRAWN_TOKENS = 1 << 16


def device_routes(model: ModelSpec, routing: RoutingSpec, num_tokens: int, seed: int, device: torch.device) -> Tensor:
    """Expert indices (num_tokens, top_k) int64 for `model` on `device`.

    The routes of fewer tokens are the first of those of more. At most 65536 tokens are drawn, which settles the
    experts' shares to a few percent of themselves; more tokens repeat them, since drawing a token costs the host far
    more than profiling it costs the device.
    """
    assert model.moe is not None, "a model with experts"
    num_drawn = _MIN_DRAWN_TOKENS
    while num_drawn < min(num_tokens, _MAX_DRAWN_TOKENS):
        num_drawn *= 4  # few sizes, so that the micro-batches of a job share what was drawn
    drawn = _draw(model.moe, routing, num_drawn, seed)[:num_tokens].to(device)
    repeats = -(-num_tokens // drawn.shape[0])
    return drawn.repeat(repeats, 1)[:num_tokens].contiguous()


@lru_cache(maxsize=8)
def _draw(moe: MoESpec, routing: RoutingSpec, num_tokens: int, seed: int) -> Tensor:
    return torch.from_numpy(draw_routes(moe, routing, num_tokens, np.random.default_rng(seed)))
