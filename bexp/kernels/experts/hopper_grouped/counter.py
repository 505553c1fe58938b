"""The counter by which the programs of a launch claim their tiles."""

from __future__ import annotations

import torch
from torch import Tensor

_COUNTERS: dict[tuple[int, int], Tensor] = {}
"""The counters by device and stream."""


def tile_counter(device: int, stream: int) -> Tensor:
    """Return a zero (1,) int32 for one launch on `stream`, which is the current one of the device with that index.

    The kernel resets it to zero. Launches on a stream follow each other, so they can share one counter, and no launch
    is needed to clear it. A captured launch may be replayed on any stream, so it has its own, which the graph clears.
    """
    if torch.cuda.is_current_stream_capturing():
        return _zero(device)
    counter = _COUNTERS.get((device, stream))
    if counter is None:
        counter = _COUNTERS.setdefault((device, stream), _zero(device))
    return counter


def _zero(device: int) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=torch.device("cuda", device))
