"""Measures one component of a step: the seconds and the bytes of its passes."""

from __future__ import annotations

from contextlib import ExitStack

from bexp.measure.memory import measure_memory
from explorer.cost_model.components import Component
from explorer.records.measurement import ComponentMeasurement
from explorer.spec.parts import ExploredModel
from explorer.spec.request import ExplorationRequest
from workers.profiler.conditions import watched_conditions
from workers.profiler.instruments import Instruments
from workers.profiler.phases import PhaseClock
from workers.targets.target import Target


def measure_component(
    instruments: Instruments,
    target: Target,
    model: ExploredModel,
    component: Component,
    request: ExplorationRequest,
    clock: PhaseClock,
) -> ComponentMeasurement:
    """Build the passes of `component`, measure their memory, and time them.

    Memory is measured in untimed passes, without recomputation of the whole component. Timed passes run as the
    component says.
    """
    with ExitStack() as stack:
        with clock.phase("build"):
            passes = stack.enter_context(target.component(component, model, request))
        with clock.phase("warm_up"):
            instruments.timer.warm_up(passes)
            memory = measure_memory(passes, instruments.device)
        with clock.phase("timed"), instruments.monitor.watch() as watch:
            timing = instruments.timer.time(passes, watch.poll)
            stalled = None
            if (waiting := passes.waiting()) is not None:
                with waiting:
                    led = instruments.timer.time_forward_in_lead(passes)
                stalled = max(0.0, led - timing.forward_device_seconds)
    return ComponentMeasurement(
        component=component,
        device_seconds=timing.device_seconds,
        host_seconds=timing.host_seconds,
        forward_device_seconds=timing.forward_device_seconds,
        standard_error_seconds=timing.standard_error_seconds,
        repeats=timing.repeats,
        saved_bytes=memory.saved,
        forward_peak_bytes=memory.forward_peak,
        backward_peak_bytes=memory.backward_peak,
        stalled_seconds=stalled,
        conditions=watched_conditions(watch),
    )
