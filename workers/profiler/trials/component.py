"""Measures one block of a model: its seconds, and the bytes that its passes need."""

from __future__ import annotations

from bexp.kernels.dtypes import torch_dtype
from bexp.measure.memory import weigh
from bexp.measure.passes import BlockPasses
from explorer.cost_model.components import Component
from explorer.records.measurement import ComponentMeasurement
from explorer.spec.model import ModelSpec
from explorer.spec.request import ExplorationRequest
from workers.profiler.bench import Bench
from workers.profiler.phases import PhaseClock
from workers.profiler.trials.ring import find_ring
from workers.targets.reference.factory import build_block, example_inputs


def measure_block(
    bench: Bench, model: ModelSpec, component: Component, request: ExplorationRequest, clock: PhaseClock
) -> ComponentMeasurement:
    """Build the block of `component`, weigh it, and time it.

    Weighing is untimed and not recomputed as a whole; timing runs the block as the component says.
    """
    training = request.mode == "train"
    with clock.phase("build"):
        generator = bench.generator(request.seed)
        size, layout = component.context_parallel_size, component.context_parallel_layout
        ranks = find_ring(bench, model, size, layout, component.backend)
        block = build_block(model, component, request, bench.device, generator=generator, context_parallel=ranks)
        inputs = example_inputs(model, component, bench.device, generator)
        gradient_dtype = torch_dtype(request.training.optimizer.gradient_dtype(model.dtype))
        meet = bench.team.meeting(component)
        passes = BlockPasses(block, inputs, training=training, gradient_dtype=gradient_dtype, meet=meet)
    with clock.phase("warm_up"):
        bench.timer.warm_up(passes)
        weight = weigh(passes, bench.device)
    with clock.phase("timed"), bench.surroundings.watch() as watch:
        timing = bench.timer.time(passes, watch.glance)
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
        conditions=watch.conditions(),
    )
