"""Modules that measure what no target does, such as what devices exchange that share a model."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from torch import nn

    from bexp.explorer.cost.components import Component
    from bexp.explorer.model.model import ModelSpec
    from bexp.explorer.records.measurement import ComponentMeasurement, WholeModelMeasurement
    from bexp.explorer.records.trial import TrialTask
    from bexp.explorer.request.request import ExplorationRequest
    from bexp.workers.instruments.device_instruments import Instruments
    from bexp.workers.instruments.phases import PhaseClock

EXTENSIONS = ("bexp.workers.meshes.extension",)


class WorkerExtension(Protocol):
    """What such a module has."""

    serves: Callable[[Component | TrialTask], bool]
    """Whether it measures this component, or runs the whole model of this task."""
    shard_of: Callable[[Component, ModelSpec, ExplorationRequest], tuple[ModelSpec, ExplorationRequest]]
    """The model whose block a component is, and the request that goes with it."""
    build_shard: Callable[..., nn.Module]
    """The module of a component, with the arguments of `reference.factory.build_block`."""
    measure_exchange: Callable[[Instruments, Component, int, PhaseClock], ComponentMeasurement]
    """Measures what devices exchange, for a seed. All ranks call it at the same time."""
    run_whole_model: Callable[[Instruments, TrialTask, ExplorationRequest, PhaseClock], WholeModelMeasurement]
    """Trains a few steps of a model that devices share. All ranks call it at the same time."""


def extension_for(subject: Component | TrialTask) -> WorkerExtension | None:
    """Return the first extension that serves a component or a task; None if the targets do."""
    known = (cast(WorkerExtension, import_module(name)) for name in EXTENSIONS)
    return next((one for one in known if one.serves(subject)), None)
