"""The processes of one training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist


class Ranks:
    """The processes of one training. A single process counts as the first."""

    @property
    def number(self) -> int:
        """Number of processes."""
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def own(self) -> int:
        """Rank of this process."""
        return dist.get_rank() if dist.is_initialized() else 0

    def share(self, message: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the message of the first process, in each process."""
        if self.number == 1:
            return message
        box = [message]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, figures: dict[str, float]) -> list[dict[str, float]]:
        """Return the figures of all processes."""
        gathered: list[Any] = [figures] * self.number
        if self.number > 1:
            dist.all_gather_object(gathered, figures)
        return gathered


def spread(each: Sequence[dict[str, float]]) -> dict[str, Any] | None:
    """Return the slowest process, by micro-steps in which it waits for no other, and the fullest;

    None for a single one.
    """
    if len(each) == 1:
        return None
    seconds, peaks = [[figures[name] for figures in each] for name in ("alone", "peak_bytes")]
    return {
        "number": len(each),
        "slowest": seconds.index(max(seconds)),
        "slower": max(seconds) / min(seconds),
        "fullest": peaks.index(max(peaks)),
        "fuller": max(peaks) / max(1.0, min(peaks)),
    }
