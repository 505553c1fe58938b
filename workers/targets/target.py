"""A target: the code whose training step is measured, opened for one job on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from bexp.explorer.cost.components import Component
from bexp.explorer.cost.text_batches import TextBatch
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.model.parts import ExploredModel
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import ComponentMeasurement
from bexp.explorer.request.request import ExplorationRequest
from bexp.measure.passes import MeteredPasses, Passes
from bexp.measure.timestamps import Mark
from bexp.workers.instruments.phases import PhaseClock


class ComponentPasses(Passes, MeteredPasses, Protocol):
    """Passes that can be timed and whose memory can be measured."""


class Optimizer(Protocol):
    """An optimizer of parameters whose gradients exist."""

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        """The gradients that the next step reads; None for a parameter that has none yet."""

    def step(self) -> None:
        """Update the parameters."""

    def zero_grad(self) -> None:
        """Set the gradients to zero, or drop them."""


@dataclass(frozen=True, slots=True)
class OptimizerPart:
    """Parameters that are stepped together."""

    count: int
    """How often the model has as many."""
    build: Callable[[], Optimizer]
    """Makes the parameters on the device, with their optimizer."""
    adds_up: bool = False
    """The model's step allocates the memory of all parts at once; otherwise one part follows another."""


class TrainingRun(Protocol):
    """A whole model with its optimizer and micro-batches."""

    is_data_parallel: bool
    """Several devices communicate gradients or parameters."""

    num_micro_steps: int

    @property
    def graph_bytes(self) -> int:
        """Bytes that CUDA graphs hold for their activations, which the allocator's peak leaves out in a replay."""

    def begin(self) -> float:
        """Prepare the first step, and run a step of one micro-step; return seconds of a whole step."""

    def step(self) -> list[Mark]:
        """Run one step; return the moments before each micro-step, before the optimizer, and after it."""

    def micro_step(self, number: int) -> None:
        """Run forward and backward of one micro-batch of a step."""

    def update(self) -> None:
        """Step the optimizer, and set the gradients to zero or drop them."""

    def finish(self) -> None:
        """Called after the last step."""


@dataclass(frozen=True, slots=True)
class Miniature:
    """A tiny model of the same kind in training. It has `num_units` units that are communicated one by one."""

    run: TrainingRun
    num_units: int


@runtime_checkable
class WholeTarget(Protocol):
    """A target that is measured as a whole, in a process of its own.

    A measurement raises TrialFailedError with the outcome of a step that fails.
    """

    def report(self, hardware: HardwareSpec) -> DeviceReport:
        """Return a report, as `ProfiledTarget.report` does."""

    def measure_component(self, component: Component, candidate: Candidate, clock: PhaseClock) -> ComponentMeasurement:
        """Measure the whole of a micro-step, or the optimizer's step."""

    def rest(self) -> None:
        """Called after each trial."""

    def close(self) -> None:
        """End the process."""


class ProfiledTarget(Protocol):
    """The interface of the code that the profiler measures.

    Each part that a method builds is alone on its device: the caller drops it before asking for the next.
    """

    def report(self, hardware: HardwareSpec) -> DeviceReport:
        """Return the choices that can be varied here, and the model's parts where the target measures its own code.

        Raises:
            UnsupportedTrialError: the target cannot measure this model at all; the message has the cause.
        """

    def rest(self) -> int:
        """Called after each trial; return the bytes of weights that stay on the device for the next one."""

    def check(self, candidate: Candidate, model: ExploredModel) -> None:
        """Raise UnsupportedTrialError if the candidate cannot be run here."""

    def component(
        self,
        component: Component,
        model: ExploredModel,
        request: ExplorationRequest,
        batch: TextBatch | None = None,
    ) -> AbstractContextManager[ComponentPasses]:
        """Build the passes of a component, whose memory is released with the context.

        `batch` is the micro-batch of a request whose texts have unequal lengths, which not every target takes.
        """

    def optimizer_parts(
        self, candidate: Candidate, model: ExploredModel, request: ExplorationRequest
    ) -> Iterator[OptimizerPart]:
        """Yield the parameters of the model, part by part."""

    def training_run(
        self, candidate: Candidate, model: ExploredModel, request: ExplorationRequest
    ) -> AbstractContextManager[TrainingRun]:
        """Build the whole model, whose memory is released with the context."""

    def miniature(
        self, model: ExploredModel, request: ExplorationRequest, *, together: bool
    ) -> AbstractContextManager[Miniature]:
        """Build a model that has as many parameter tensors a layer, and next to nothing to compute or to communicate.

        The ranks train it together, or each trains one alone.
        """
