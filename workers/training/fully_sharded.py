"""Training state sharded over devices with torch's fully_shard. The import takes half a second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from bexp.explorer.model.training import Sharding
from bexp.workers.training.data_parallel import Step, Stepped, spread_parameters


class FullySharded:
    """A ZeRO level (Rajbhandari et al., 2020, arXiv:1910.02054) with torch's fully_shard.

    ZeRO-3 gathers the parameters of a unit while it runs, and reduces gradients in each micro-step. The unit that
    forward runs last is the first in backward, so its parameters stay whole between the two. ZeRO-2 gathers parameters
    in the first micro-step, and keeps them whole to the end of the last. ZeRO-1 also accumulates whole gradients, and
    reduces them in the last micro-step. Each unit is sharded when it is built, so that no device ever holds the whole
    model.
    """

    def __init__(
        self, members: dist.ProcessGroup, device: torch.device, sharding: Sharding, reduced: torch.dtype | None
    ) -> None:
        self._mesh = DeviceMesh.from_group(members, device.type)
        self._sharding = sharding
        self._policy = MixedPrecisionPolicy(reduce_dtype=reduced)
        self._model: FSDPModule | None = None

    def take(self, unit: nn.Module, *, is_last: bool) -> None:
        """Shard the unit, except experts that other ranks do not have."""
        reshard = self._sharding is Sharding.ZERO3 and not is_last
        apart = spread_parameters(unit)
        fully_shard(
            unit,
            mesh=self._mesh,
            reshard_after_forward=reshard,
            mp_policy=self._policy,
            ignored_params=apart or None,
        )

    def wrap(self, model: nn.Module) -> nn.Module:
        """Shard modules that belong to no unit. A tied embedding also runs last, as the head, so it stays whole."""
        self.take(model, is_last=True)
        assert isinstance(model, FSDPModule)
        self._model = model
        return model

    def prepare(self, optimizer: Stepped, micro_step: Step) -> None:
        """Do nothing."""

    @contextmanager
    def micro_step(self, *, is_last: bool) -> Iterator[None]:
        """Set whether units reduce gradients, and whether they free whole parameters after backward."""
        assert self._model is not None
        self._model.set_requires_gradient_sync(is_last or self._sharding is not Sharding.ZERO1)
        self._model.set_reshard_after_backward(is_last or self._sharding is Sharding.ZERO3)
        yield

    def finish(self) -> None:
        """Do nothing, because fully_shard waits for its own communication."""
