"""Measures an optimizer step: on one layer of each kind and on the ends of the model, scaled to all of it."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from bexp.measure.device_monitor import Watch
from bexp.measure.memory_meters import byte_meter
from bexp.measure.timing import Timing
from explorer.cost_model.components import Component, ComponentKind
from explorer.records.measurement import ComponentMeasurement
from explorer.spec.candidate import Candidate
from explorer.spec.model import LayerKind, ModelSpec
from explorer.spec.request import ExplorationRequest
from workers.profiler.conditions import watched_conditions
from workers.profiler.instruments import Instruments
from workers.profiler.phases import PhaseClock
from workers.targets.reference.factory import build_block
from workers.targets.reference.optimizer import TrainingOptimizer, build_optimizer
from workers.targets.reference.shapes import torch_dtype


@dataclass(frozen=True, slots=True)
class _Part:
    """Components whose parameters are stepped together, and how often the model has them."""

    components: tuple[Component, ...]
    count: int


class _StepPasses:
    """An optimizer step as a forward without backward; the gradients are drawn anew each time."""

    training = False
    is_chainable = False

    def __init__(self, optimizer: TrainingOptimizer) -> None:
        self._optimizer = optimizer

    def prepare_forward(self) -> None:
        """Fill the gradients: backward has just written them."""
        for gradient in self._optimizer.gradients:
            if gradient is not None:
                gradient.normal_(0.0, 1e-3)

    def forward(self) -> None:
        """Step, and set the gradients to zero."""
        self._optimizer.step()
        self._optimizer.zero_grad()

    def prepare_backward(self) -> None:
        """There is none."""

    def backward(self) -> None:
        """There is none."""

    def run_chain(self, length: int) -> None:
        """A model has one optimizer step, not several in a row."""


def measure_optimizer(
    instruments: Instruments,
    model: ModelSpec,
    component: Component,
    candidate: Candidate,
    request: ExplorationRequest,
    clock: PhaseClock,
) -> ComponentMeasurement:
    """Seconds of one device's step over the model, and the most that a step allocates for the time it takes.

    A step reads and writes each parameter's state once, so its time is proportional to their number: a layer of each
    kind is stepped and counted as often as the model has it.
    """
    timings: list[tuple[int, Timing]] = []
    transient = 0
    watch = instruments.monitor.watch()
    for part in _parts(model, candidate):
        timing, allocated = _measure_part(instruments, model, part, request, clock, watch)
        timings.append((part.count, timing))
        transient = max(transient, allocated)
        gc.collect()
    device = sum(count * timing.device_seconds for count, timing in timings)
    return ComponentMeasurement(
        component=component,
        device_seconds=device,
        host_seconds=sum(count * timing.host_seconds for count, timing in timings),
        forward_device_seconds=device,
        standard_error_seconds=math.hypot(*(count * timing.standard_error_seconds for count, timing in timings)),
        repeats=min(timing.repeats for _, timing in timings),
        saved_bytes=0,
        forward_peak_bytes=transient,
        backward_peak_bytes=transient,
        conditions=watched_conditions(watch),
    )


def _parts(model: ModelSpec, candidate: Candidate) -> Iterator[_Part]:
    def component(kind: ComponentKind, backend: str | None = None) -> Component:
        return Component(kind=kind, micro_batch_size=1, backend=backend)

    yield _Part((component(ComponentKind.EMBEDDING), component(ComponentKind.HEAD)), 1)
    attention = component(ComponentKind.ATTENTION, candidate.attention_backend)
    ffns = {
        LayerKind.DENSE: component(ComponentKind.DENSE_FFN),
        LayerKind.MOE: component(ComponentKind.MOE_FFN, candidate.expert_backend),
    }
    for kind, ffn in ffns.items():
        if count := model.count_layers(kind):
            yield _Part((attention, ffn), count)


def _measure_part(
    instruments: Instruments,
    model: ModelSpec,
    part: _Part,
    request: ExplorationRequest,
    clock: PhaseClock,
    watch: Watch,
) -> tuple[Timing, int]:
    with byte_meter(instruments.device, ()) as meter:
        with clock.phase("build"):
            parameters = _parameters(instruments, model, part, request)
            optimizer = build_optimizer(parameters, request.training.optimizer, model.dtype)
            if all(gradient is None for gradient in optimizer.gradients):
                for parameter in parameters:
                    parameter.grad = torch.zeros_like(parameter)
            passes = _StepPasses(optimizer)
        with clock.phase("warm_up"):
            passes.prepare_forward()
            passes.forward()
            meter.reset_peak()
            base = meter.level()
            passes.forward()
            transient = meter.peak() - base
    with clock.phase("warm_up"):
        instruments.timer.warm_up(passes)
    with clock.phase("timed"), watch:
        return instruments.timer.time(passes, watch.poll), transient


def _parameters(
    instruments: Instruments, model: ModelSpec, part: _Part, request: ExplorationRequest
) -> list[nn.Parameter]:
    """Of the part's blocks, each once: a tied projection belongs to the embedding.

    Of sharded training one device has, and needs memory for, its share of each.
    """
    if request.optimizer_shards == 1:
        return _build_parameters(instruments.device, instruments.generator(request.seed), model, part, request)
    generator = instruments.generator(request.seed)
    shapes = _build_parameters(torch.device("meta"), None, model, part, request)
    shares = [-(-parameter.numel() // request.optimizer_shards) for parameter in shapes]
    dtype = torch_dtype(model.dtype)
    return [
        nn.Parameter(torch.empty(share, dtype=dtype, device=instruments.device).normal_(0.0, 0.02, generator=generator))
        for share in shares
    ]


def _build_parameters(
    device: torch.device,
    generator: torch.Generator | None,
    model: ModelSpec,
    part: _Part,
    request: ExplorationRequest,
) -> list[nn.Parameter]:
    eager = request.model_copy(update={"execution": "eager"})  # no block is run
    parameters: dict[int, nn.Parameter] = {}
    tied: nn.Parameter | None = None
    for component in part.components:
        block = build_block(model, component, eager, device, generator=generator, w_tied=tied)
        if component.kind is ComponentKind.EMBEDDING and model.tie_embeddings:
            tied = next(p for p in block.parameters() if p.shape == (model.vocab_size, model.hidden_size))
        parameters |= {id(parameter): parameter for parameter in block.parameters()}
    return list(parameters.values())
