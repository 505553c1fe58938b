"""Routes on a device: drawn once for a number of tokens, used by every expert block."""

from __future__ import annotations

import torch
from torch import Tensor

from bexp.explorer.model.model import ModelSpec
from bexp.explorer.model.routes import draw_batch_routes
from bexp.explorer.model.routing import RoutingSpec


def device_routes(model: ModelSpec, routing: RoutingSpec, num_tokens: int, seed: int, device: torch.device) -> Tensor:
    """Return expert indices (num_tokens, top_k) int64 for `model` on `device`, which repeat for many tokens."""
    assert model.moe is not None, "a model with experts"
    drawn = torch.from_numpy(draw_batch_routes(model.moe, routing, num_tokens, seed)).to(device)
    repeats = -(-num_tokens // drawn.shape[0])
    return drawn.repeat(repeats, 1)[:num_tokens].contiguous()
