"""An optimizer step, measured on one layer of each kind, the embedding and the head, and scaled to the model."""

from __future__ import annotations

import gc
import math

from bexp.explorer.cost.components import Component
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.parts import ExploredModel
from bexp.explorer.records.measurement import ComponentMeasurement
from bexp.explorer.request.request import ExplorationRequest
from bexp.measure.memory_meters import byte_meter
from bexp.measure.timing import Timing
from bexp.workers.instruments.device_instruments import Instruments
from bexp.workers.instruments.device_monitor import Watch
from bexp.workers.instruments.phases import PhaseClock
from bexp.workers.targets.target import Optimizer, OptimizerPart, ProfiledTarget


class _StepPasses:
    """An optimizer step as a forward without backward. Each step has new random gradients."""

    training = False
    is_chainable = False

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def prepare_forward(self) -> None:
        """Fill the gradients, as backward does just before a step."""
        for gradient in self._optimizer.gradients:
            if gradient is not None:
                gradient.normal_(0.0, 1e-3)

    def forward(self) -> None:
        """Step, and set the gradients to zero."""
        self._optimizer.step()
        self._optimizer.zero_grad()

    def prepare_backward(self) -> None:
        """Do nothing, because a step has no backward."""

    def backward(self) -> None:
        """Do nothing, because a step has no backward."""

    def run_chain(self, length: int) -> None:
        """Do nothing, because a model never steps several times in a row."""


def measure_optimizer(
    instruments: Instruments,
    target: ProfiledTarget,
    model: ExploredModel,
    component: Component,
    candidate: Candidate,
    request: ExplorationRequest,
    clock: PhaseClock,
) -> ComponentMeasurement:
    """Measure the seconds of one device's step over the model, and the most bytes that a step allocates temporarily.

    A step reads and writes the state of each parameter once, so its time is proportional to their number. One layer of
    each kind is therefore stepped, and counted as often as the model has it.
    """
    timings: list[tuple[int, Timing]] = []
    transient = 0
    watch = instruments.monitor.watch()
    for part in target.optimizer_parts(candidate, model, request):
        timing, allocated = _measure_part(instruments, part, clock, watch)
        timings.append((part.count, timing))
        transient = transient + part.count * allocated if part.adds_up else max(transient, allocated)
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
        conditions=watch.conditions(),
    )


def _measure_part(
    instruments: Instruments,
    part: OptimizerPart,
    clock: PhaseClock,
    watch: Watch,
) -> tuple[Timing, int]:
    with byte_meter(instruments.device, ()) as meter:
        with clock.phase("build"):
            passes = _StepPasses(part.build())
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
