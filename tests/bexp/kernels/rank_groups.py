"""What ranks of several groups have in common: how they join, and how what they refuse is written down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from tests.waits import PATIENCE_SECONDS


def join_groups(folder: Path, rank: int, num_ranks: int, sizes: Sequence[int]) -> dict[int, Any]:
    """Join `num_ranks` ranks on the CPU; return, by size, this rank's group of neighbours."""
    torch.set_num_threads(1)
    store = FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=PATIENCE_SECONDS)
    )
    groups = {}
    for size in sizes:
        for first in range(0, num_ranks, size):
            group = dist.new_group(list(range(first, first + size)))
            if first <= rank < first + size:
                groups[size] = group
    return groups


def refusals_of(calls: Mapping[str, Callable[[], object]]) -> dict[str, str]:
    """The messages of those of `calls` that raise ValueError, by name."""
    said = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            said[name] = str(error)
    return said
