"""What workers measure of meshes of devices: shards of blocks, exchanges, and whole models on all ranks.

`bexp.workers.targets.extensions` names this package, and no other file of the workers does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.meshes.mesh import MeshRun
from bexp.explorer.meshes.shards import is_shard, shard_of

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import nn

    from bexp.explorer.model.model import ModelSpec
    from bexp.explorer.records.measurement import ComponentMeasurement, WholeModelMeasurement
    from bexp.explorer.records.trial import TrialTask
    from bexp.explorer.request.request import ExplorationRequest
    from bexp.workers.instruments.device_instruments import Instruments
    from bexp.workers.instruments.phases import PhaseClock


def serves(subject: Component | TrialTask) -> bool:
    """Return whether it is a shard or an exchange, or a whole model on a mesh."""
    if isinstance(subject, Component):
        return subject.kind is ComponentKind.EXCHANGE or is_shard(subject)
    return isinstance(subject.shared_run, MeshRun)


def model_of(
    component: Component, model: ModelSpec, request: ExplorationRequest
) -> tuple[ModelSpec, ExplorationRequest]:
    """Return the model whose block a component is, and the request that goes with it."""
    return shard_of(component, model, request)


def build_block(
    model: ModelSpec,
    component: Component,
    request: ExplorationRequest,
    device: torch.device,
    *,
    generator: torch.Generator | None,
    w_tied: nn.Parameter | None,
    group: dist.ProcessGroup | None,
) -> nn.Module:
    """Return a device's share of a block; within the context of its `waiting`, that of a rank of `group`."""
    from bexp.workers.meshes.blocks import build_shard  # noqa: PLC0415 - most trials have none

    return build_shard(model, component, request, device, generator=generator, w_tied=w_tied, group=group)


def measure_exchange(
    instruments: Instruments, component: Component, seed: int, clock: PhaseClock
) -> ComponentMeasurement:
    """Measure an operation of a mesh. All ranks must call this at the same time."""
    from bexp.workers.meshes.exchange import measure_mesh_operation  # noqa: PLC0415 - most trials have none

    return measure_mesh_operation(instruments, component, seed, clock)


def run_whole_model(
    instruments: Instruments, task: TrialTask, request: ExplorationRequest, clock: PhaseClock
) -> WholeModelMeasurement:
    """Train a few steps of a model on all ranks of a mesh.

    Raises:
        UnsupportedTrialError: the model cannot be spread like this.
    """
    from bexp.workers.meshes.whole_model import run_mesh_model  # noqa: PLC0415 - most trials have none

    return run_mesh_model(instruments, task, request, clock)
