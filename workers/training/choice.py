"""Chooses how processes train together, as the request asks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from bexp.explorer.model.training import Sharding
from bexp.workers.training.data_parallel import DataParallel, SingleProcess
from bexp.workers.training.replicated import Replicated, ReplicatedMain


def data_parallel(
    members: dist.ProcessGroup | None,
    device: torch.device,
    sharding: Sharding,
    parameter_dtype: torch.dtype,
    gradient_dtype: torch.dtype,
) -> DataParallel:
    """Return how the processes of `members` train together with this sharding; None if one process trains alone."""
    if members is None:
        return SingleProcess()
    separate = gradient_dtype is not parameter_dtype
    if sharding is not Sharding.NONE:
        from bexp.workers.training.fully_sharded import FullySharded  # noqa: PLC0415 - takes half a second

        return FullySharded(members, device, sharding, gradient_dtype if separate else None)
    return ReplicatedMain(members) if separate else Replicated(members)
