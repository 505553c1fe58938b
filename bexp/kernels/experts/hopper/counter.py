"""The counter by which the programs of a launch claim their tiles."""

from __future__ import annotations

import torch
from torch import Tensor

_COUNTERS: dict[tuple[torch.device, int], Tensor] = {}
"""The counters by device and stream."""


def tile_counter(device: torch.device) -> Tensor:
    """Return a zero (1,) int32 for one launch on the current stream of `device`.

    The kernel resets it to zero. Launches on a stream follow each other, so they can share one counter, and no launch
    is needed to clear it. A captured launch may be replayed on any stream, so it has its own, which the graph clears.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    counter = _COUNTERS.get(key)
    if counter is None:
        counter = _COUNTERS.setdefault(key, torch.zeros(1, dtype=torch.int32, device=device))
    return counter
