"""The measurement of one component of a step: the seconds and the bytes of its passes."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.cost.request_texts import text_batches
from bexp.explorer.cost.text_batches import TextBatch, TextBatches
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.parts import ExploredModel
from bexp.explorer.records.measurement import BatchFigures, ComponentMeasurement
from bexp.explorer.request.request import ExplorationRequest
from bexp.measure.memory_meters import ActivationBytes, byte_meter, measure_memory
from bexp.measure.passes import Passes
from bexp.measure.timing import Timing
from bexp.workers.instruments.device_instruments import Instruments
from bexp.workers.instruments.device_monitor import Watch
from bexp.workers.instruments.phases import PhaseClock
from bexp.workers.targets.target import ComponentPasses, Optimizer, OptimizerPart, ProfiledTarget

LONG_PASS_SECONDS = 0.25
LEAST_SECONDS = 1e-9
MEAN_SECONDS = ("device_seconds", "host_seconds", "forward_device_seconds")
WITH_ATTENTION = frozenset({ComponentKind.ATTENTION, ComponentKind.LAYER})
_widths_run: set[tuple[int, int]] = set()
"""Sizes and widths of micro-batches that this process has run."""
BYTES = ("saved_bytes", "forward_peak_bytes", "backward_peak_bytes")


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
    component says. If ranks share its experts, all of them must call this at the same time. Where texts have unequal
    lengths, several micro-batches are measured, and the result is their mean over an epoch.
    """
    batches = text_batches(request, component.micro_batch_size)
    if batches is None:
        return _measure(instruments, lambda: target.component(component, model, request), component, clock)
    _widths_run.update((batch.size, batch.width) for batch in batches.measured)
    measured = [
        _measure(instruments, partial(target.component, component, model, request, batch), component, clock)
        for batch in batches.measured
    ]
    composed = compose_batches(batches, measured)
    if instruments.device.type != "cuda" or component.kind not in WITH_ATTENTION or not batches.new_width_share:
        return composed
    usual = batches.measured[len(batches.measured) // 2 - 1]
    build = partial(target.component, component, model, request)
    with clock.phase("timed"):
        return composed.model_copy(update={"new_width_seconds": new_width_seconds(instruments, build, usual)})


def new_width_seconds(
    instruments: Instruments, build: Callable[[TextBatch], AbstractContextManager[ComponentPasses]], usual: TextBatch
) -> float | None:
    """Return the additional seconds of passes when this process first runs rows of a width near a usual micro-batch's.

    The result is None if the process has run all narrower widths.

    cuDNN's attention, for one, plans its kernels for each shape. The smaller figure of two widths counts, because the
    allocator may have to ask for memory in the first.
    """
    found = []
    for _ in range(2):
        batch = usual
        while (width := (batch.size, batch.width)) in _widths_run:
            if batch.width == 1:
                return None
            batch = batch.narrowed()
        _widths_run.add(width)
        with build(batch) as passes:
            first, *later = (_seconds_once(instruments, passes) for _ in range(3))
        found.append(max(0.0, first - min(later)))
    return min(found)


def _seconds_once(instruments: Instruments, passes: Passes) -> float:
    instruments.synchronize()
    started = time.perf_counter()
    passes.prepare_forward()
    passes.forward()
    if passes.training:
        passes.prepare_backward()
        passes.backward()
    instruments.synchronize()
    return time.perf_counter() - started


def compose_batches(batches: TextBatches, measured: Sequence[ComponentMeasurement]) -> ComponentMeasurement:
    """Return the mean of micro-batches over an epoch, with the bytes and the conditions of the longest."""
    seconds: dict[str, float] = {}
    for name in MEAN_SECONDS:
        seconds[name], error = batches.expect([getattr(one, name) for one in measured])
        if name == "device_seconds":
            own = max(one.standard_error_seconds / max(one.device_seconds, LEAST_SECONDS) for one in measured)
            seconds["standard_error_seconds"] = math.hypot(error, own * seconds[name])
    figures = tuple(
        BatchFigures(positions=batch.positions, **{name: getattr(one, name) for name in ("device_seconds", *BYTES)})
        for batch, one in zip(batches.measured, measured, strict=True)
    )
    longest = {name: max(getattr(one, name) for one in measured) for name in BYTES}
    bad = next((one.conditions for one in measured if one.contamination is not None), measured[-1].conditions)
    return measured[-1].model_copy(update={**seconds, **longest, "batches": figures, "conditions": bad})


def _measure(
    instruments: Instruments,
    build: Callable[[], AbstractContextManager[ComponentPasses]],
    component: Component,
    clock: PhaseClock,
) -> ComponentMeasurement:
    with ExitStack() as stack:
        with clock.phase("build"):
            passes = stack.enter_context(build())
        with clock.phase("warm_up"):
            memory = _warm_up(instruments, passes)
        with clock.phase("timed"), instruments.monitor.watch() as watch:
            timing = instruments.timer.time(passes, watch.poll)
            waited: dict[str, float] = {}
            if (waiting := passes.waiting()) is not None:
                with waiting:
                    waited = _time_together(instruments, passes)
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
        conditions=watch.conditions(),
        **waited,
    )


def _warm_up(instruments: Instruments, passes: ComponentPasses) -> ActivationBytes:
    """Run the passes until they are as fast as they get; return their memory.

    On a CPU the pass whose memory is measured is a warm-up as well, and the only one if it is long.
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


def _time_together(instruments: Instruments, passes: Passes) -> dict[str, float]:
    """Return the seconds of a block that ranks run together, with the host's waits."""
    instruments.timer.warm_up(passes)  # ranks have different numbers of rows
    waited = instruments.timer.time_waiting(passes)
    if waited is None:
        timing = instruments.timer.time(passes)
        forward = timing.forward_device_seconds
        return {
            "together_forward_seconds": forward,
            "together_backward_seconds": timing.device_seconds - forward,
        }
    return {
        "waiting_forward_seconds": waited.forward_in_row,
        "together_forward_seconds": waited.forward,
        "together_backward_seconds": waited.backward,
        "together_host_backward_seconds": waited.host_backward,
    }


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
