"""Packages that measure what no target does, such as what devices exchange that share a model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import nn

    from bexp.explorer.cost.components import Component
    from bexp.explorer.model.model import ModelSpec
    from bexp.explorer.records.measurement import ComponentMeasurement, WholeModelMeasurement
    from bexp.explorer.records.trial import TrialTask
    from bexp.explorer.request.request import ExplorationRequest
    from bexp.workers.instruments.device_instruments import Instruments
    from bexp.workers.instruments.phases import PhaseClock

EXTENSIONS = ("bexp.workers.meshes",)


class WorkerExtension(Protocol):
    """What such a package has."""

    def serves(self, subject: Component | TrialTask) -> bool:
        """Return whether the package measures this component, or runs the whole model of this task."""

    def model_of(
        self, component: Component, model: ModelSpec, request: ExplorationRequest
    ) -> tuple[ModelSpec, ExplorationRequest]:
        """Return the model whose block a component is, and the request that goes with it."""

    def build_block(
        self,
        model: ModelSpec,
        component: Component,
        request: ExplorationRequest,
        device: torch.device,
        *,
        generator: torch.Generator | None,
        w_tied: nn.Parameter | None,
        group: dist.ProcessGroup | None,
    ) -> nn.Module:
        """Return the module of a component, as `reference.factory.build_block` does."""

    def measure_exchange(
        self, instruments: Instruments, component: Component, seed: int, clock: PhaseClock
    ) -> ComponentMeasurement:
        """Measure what devices exchange. All ranks must call this at the same time."""

    def run_whole_model(
        self, instruments: Instruments, task: TrialTask, request: ExplorationRequest, clock: PhaseClock
    ) -> WholeModelMeasurement:
        """Train a few steps of a model that devices share. All ranks must call this at the same time."""


def extension_for(subject: Component | TrialTask) -> WorkerExtension | None:
    """Return the first extension that serves a component or a task; None if the targets do."""
    known = (cast(WorkerExtension, import_module(name)) for name in EXTENSIONS)
    return next((one for one in known if one.serves(subject)), None)
