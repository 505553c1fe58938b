"""Which way of training together a request asks for."""

from __future__ import annotations

import torch
import torch.distributed as dist

from explorer.spec.training import Sharding
from workers.profiler.training.data_parallel import Alone, DataParallel
from workers.profiler.training.replicated import Replicated, ReplicatedMain


def data_parallel(
    members: dist.ProcessGroup | None,
    device: torch.device,
    sharding: Sharding,
    parameter_dtype: torch.dtype,
    gradient_dtype: torch.dtype,
) -> DataParallel:
    """How `members` train together with this sharding; null for a process that trains alone."""
    if members is None:
        return Alone()
    own = gradient_dtype is not parameter_dtype
    if sharding is not Sharding.NONE:
        from workers.profiler.training.fully_sharded import FullySharded  # noqa: PLC0415 - takes half a second

        return FullySharded(members, device, sharding, gradient_dtype if own else None)
    return ReplicatedMain(members) if own else Replicated(members)
