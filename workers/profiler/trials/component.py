"""Measures one component of a step: the seconds and the bytes of its passes."""

from __future__ import annotations

import time
from contextlib import ExitStack

from bexp.explorer.cost_model.components import Component
from bexp.explorer.records.measurement import ComponentMeasurement
from bexp.explorer.spec.parts import ExploredModel
from bexp.explorer.spec.request import ExplorationRequest
from bexp.measure.memory import ActivationBytes, measure_memory
from bexp.measure.passes import Passes
from bexp.measure.timing import Timing
from bexp.workers.instruments.device_instruments import Instruments
from bexp.workers.instruments.phases import PhaseClock
from bexp.workers.profiler.conditions import watched_conditions
from bexp.workers.targets.target import ComponentPasses, ProfiledTarget

LONG_PASS_SECONDS = 0.25


def measure_component(
    instruments: Instruments,
    target: ProfiledTarget,
    model: ExploredModel,
    component: Component,
    request: ExplorationRequest,
    clock: PhaseClock,
) -> ComponentMeasurement:
    """Build the passes of `component`, measure their memory, and time them.

    Memory is measured in untimed passes, without recomputation of the whole component. Timed passes run as the
    component says. If ranks share its experts, all of them must call this at the same time.
    """
    together = component.expert_parallel_size > 1 and instruments.rank_group.size > 1
    with ExitStack() as stack:
        with clock.phase("build"):
            passes = stack.enter_context(target.component(component, model, request))
        with clock.phase("warm_up"):
            memory = _warm_up(instruments, passes)
        with clock.phase("timed"), instruments.monitor.watch() as watch:
            timing = instruments.timer.time(passes, watch.poll)
            waited: dict[str, float] = {}
            if (waiting := passes.waiting()) is not None:
                with waiting:
                    waited = _time_waiting(instruments, passes, timing, together=together)
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
        conditions=watched_conditions(watch),
        **waited,
    )


def _warm_up(instruments: Instruments, passes: ComponentPasses) -> ActivationBytes:
    """Run the passes until they are as fast as they get; return their memory.

    On a CPU the pass whose memory is measured counts, and is enough if it is long.
    """
    if instruments.device.type != "cpu":
        instruments.timer.warm_up(passes)
        return measure_memory(passes, instruments.device)
    started = time.perf_counter()
    memory = measure_memory(passes, instruments.device)
    (seconds,) = instruments.rank_group.all_reduce_max(time.perf_counter() - started)
    if seconds < LONG_PASS_SECONDS:
        instruments.timer.warm_up(passes)
    return memory


def _time_waiting(instruments: Instruments, passes: Passes, alone: Timing, *, together: bool) -> dict[str, float]:
    """Return what the host's waits add to a block that runs `alone`, or its seconds if ranks run it `together`."""
    if together:
        instruments.timer.warm_up(passes)  # other ranks have other numbers of rows
    waited = instruments.timer.time_waiting(passes)
    if waited is None:
        if not together:
            return {}
        timing = instruments.timer.time(passes)
        forward = timing.forward_device_seconds
        return {
            "together_forward_seconds": forward,
            "together_backward_seconds": timing.device_seconds - forward,
        }
    if not together:
        stalled = max(0.0, waited.forward - alone.forward_device_seconds)
        return {"stalled_seconds": stalled, "waiting_forward_seconds": waited.forward_in_row}
    return {
        "waiting_forward_seconds": waited.forward_in_row,
        "together_forward_seconds": waited.forward,
        "together_backward_seconds": waited.backward,
        "together_host_backward_seconds": waited.host_backward,
    }
