"""Measures one block of a model: its seconds, and the bytes that its passes need."""

from __future__ import annotations

from bexp.measure.memory import measure_memory
from explorer.cost_model.components import Component
from explorer.records.measurement import ComponentMeasurement
from explorer.spec.model import ModelSpec
from explorer.spec.request import ExplorationRequest
from workers.profiler.conditions import watched_conditions
from workers.profiler.instruments import Instruments
from workers.profiler.phases import PhaseClock
from workers.profiler.trials.ring import find_ring
from workers.targets.reference.factory import build_block, example_inputs
from workers.targets.reference.passes import BlockPasses
from workers.targets.reference.shapes import torch_dtype


def measure_block(
    instruments: Instruments, model: ModelSpec, component: Component, request: ExplorationRequest, clock: PhaseClock
) -> ComponentMeasurement:
    """Build the block of `component`, measure_memory it, and time it.

    Weighing is untimed and not recomputed as a whole; timing runs the block as the component says.
    """
    training = request.mode == "train"
    with clock.phase("build"):
        generator = instruments.generator(request.seed)
        size, layout = component.context_parallel_size, component.context_parallel_layout
        ranks = find_ring(instruments, model, size, layout, component.backend)
        block = build_block(model, component, request, instruments.device, generator=generator, context_parallel=ranks)
        inputs = example_inputs(model, component, instruments.device, generator)
        gradient_dtype = torch_dtype(request.training.optimizer.gradient_dtype(model.dtype))
        meet = instruments.ranks.barrier(component)
        passes = BlockPasses(block, inputs, training=training, gradient_dtype=gradient_dtype, meet=meet)
    with clock.phase("warm_up"):
        instruments.timer.warm_up(passes)
        weight = measure_memory(passes, instruments.device)
    with clock.phase("timed"), instruments.monitor.watch() as watch:
        timing = instruments.timer.time(passes, watch.poll)
    return ComponentMeasurement(
        component=component,
        device_seconds=timing.device_seconds,
        host_seconds=timing.host_seconds,
        forward_device_seconds=timing.forward_device_seconds,
        standard_error_seconds=timing.standard_error_seconds,
        repeats=timing.repeats,
        saved_bytes=weight.saved,
        forward_peak_bytes=weight.forward_peak,
        backward_peak_bytes=weight.backward_peak,
        conditions=watched_conditions(watch),
    )
