"""Training state that is sharded over devices, by torch's fully_shard; importing it takes half a second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from explorer.spec.training import Sharding
from workers.profiler.training.data_parallel import Step
from workers.targets.reference.optimizer import TrainingOptimizer


class FullySharded:
    """A ZeRO level (Rajbhandari et al., 2020, arXiv:1910.02054) by torch's fully_shard.

    With ZeRO-3 parameters are whole while a unit runs, and gradients reduced in each micro-step; what comes last in
    forward comes first in backward, and stays whole between. With ZeRO-2 parameters are gathered in the first
    micro-step and stay whole to the end of the last. With ZeRO-1 moreover gradients are accumulated whole, and reduced
    in the last. Units are sharded as soon as they are built, so that the whole model is never in one memory.
    """

    def __init__(
        self, members: dist.ProcessGroup, device: torch.device, sharding: Sharding, reduced: torch.dtype | None
    ) -> None:
        self._mesh = DeviceMesh.from_group(members, device.type)
        self._sharding = sharding
        self._policy = MixedPrecisionPolicy(reduce_dtype=reduced)
        self._model: FSDPModule | None = None

    def take(self, unit: nn.Module, *, is_last: bool) -> None:
        """Shard it."""
        reshard = self._sharding is Sharding.ZERO3 and not is_last
        fully_shard(unit, mesh=self._mesh, reshard_after_forward=reshard, mp_policy=self._policy)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Shard what belongs to no unit: an embedding that is tied to the head comes last as well as first."""
        self.take(model, is_last=True)
        assert isinstance(model, FSDPModule)
        self._model = model
        return model

    def prepare(self, optimizer: TrainingOptimizer, micro_step: Step) -> None:
        """There is nothing to prepare."""

    @contextmanager
    def micro_step(self, *, is_last: bool) -> Iterator[None]:
        """Tell the units whether to reduce gradients, and whether to let go of parameters after backward."""
        assert self._model is not None
        self._model.set_requires_gradient_sync(is_last or self._sharding is not Sharding.ZERO1)
        self._model.set_reshard_after_backward(is_last or self._sharding is Sharding.ZERO3)
        yield

    def finish(self) -> None:
        """There is nothing: fully_shard waits for what it exchanges."""
