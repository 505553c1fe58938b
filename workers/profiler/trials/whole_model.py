"""A run of the whole model as a trainer would run it, to check the figures that are composed from its components."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, Protocol, TypeVar

import torch

from bexp.explorer.cost.request_texts import text_batches
from bexp.explorer.cost.text_batches import TextBatches
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.parts import ExploredModel
from bexp.explorer.model.training import Sharding
from bexp.explorer.records.measurement import WholeModelMeasurement
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.suggestion import LONG_STEP_SECONDS
from bexp.measure.memory_meters import byte_meter
from bexp.measure.timestamps import Mark
from bexp.measure.timing import collector_paused, standard_error
from bexp.workers.instruments.device_instruments import Instruments
from bexp.workers.instruments.device_monitor import Watch
from bexp.workers.instruments.failures import UnsupportedTrialError
from bexp.workers.instruments.phases import PhaseClock
from bexp.workers.targets.target import ProfiledTarget, TrainingRun

MIN_STEPS = 2
MAX_STEPS = 10
TIMED_SECONDS = {"cuda": 1.5, "cpu": 3.0}
"""Steps are timed for so long. On a GPU two runs of a model differ by more than the steps of one run of this length."""


def _step_seconds(instruments: Instruments, training: _Stepped) -> float:
    started = time.perf_counter()
    training.step()
    instruments.synchronize()
    return time.perf_counter() - started


def _micro_steps(moments: Sequence[Mark]) -> list[float]:
    return [start.seconds_until(end) for start, end in pairwise(moments[:-1])]


def _split(steps: Sequence[Sequence[Mark]]) -> tuple[list[float], list[float]]:
    """Seconds of a typical micro-step of each step, and the further seconds of all its micro-steps.

    The second micro-step is typical. If the host is slower than the device, the first seems too short, because it began
    only after the device had finished the optimizer.
    """
    micro_steps, once = [], []
    for moments in steps:
        each = _micro_steps(moments)
        typical = each[1]
        micro_steps.append(typical)
        once.append(sum(each) - len(each) * typical)
    return micro_steps, once


def run_whole_model(
    instruments: Instruments,
    target: ProfiledTarget,
    model: ExploredModel,
    candidate: Candidate,
    request: ExplorationRequest,
    clock: PhaseClock,
) -> WholeModelMeasurement:
    """Train a few steps of accumulated micro-steps, back to back, or run forwards alone in eval mode.

    Raises:
        UnsupportedTrialError: the training state is sharded over more devices than there are, or sequences cannot be
            shared as the candidate says.
    """
    sharded = request.training.sharding is not Sharding.NONE and request.mode == "train"
    if sharded and instruments.rank_group.size < request.num_devices:
        has = "one" if instruments.rank_group.size == 1 else f"{instruments.rank_group.size} of them"
        raise UnsupportedTrialError(
            f"a whole model with sharding '{request.training.sharding}' needs {request.num_devices} devices; "
            f"the profiler has {has}"
        )
    instruments.settle(release=True)
    with ExitStack() as stack:

        def build() -> TrainingRun:
            return stack.enter_context(target.training_run(candidate, model, request))

        compiles = request.execution_of(candidate).compiles
        return _summarize(run_steps(instruments, build, clock, compiles=compiles), request, candidate)


class _Stepped(Protocol):
    """A model in training whose steps are timed."""

    @property
    def graph_bytes(self) -> int: ...

    def begin(self) -> float: ...

    def step(self) -> list[Mark]: ...

    def finish(self) -> None: ...


R = TypeVar("R", bound=_Stepped)


@dataclass(frozen=True, slots=True)
class TimedSteps(Generic[R]):
    """The moments of each timed step, and the bytes of this device."""

    training: R
    marks: list[list[Mark]]
    peak_bytes: int
    reserved_bytes: int
    watch: Watch


def run_steps(
    instruments: Instruments,
    build: Callable[[], R],
    clock: PhaseClock,
    most_steps: int = MAX_STEPS,
    *,
    compiles: bool = False,
) -> TimedSteps[R]:
    """Build a model, bring it to its steady state, and time its steps back to back.

    All ranks that train together must call this at the same time, and run as many steps.
    """
    cuda = instruments.device.type == "cuda"
    with byte_meter(instruments.device, ()) as meter:
        with clock.phase("build"):
            training = build()
        with clock.phase("warm_up"):
            (step_seconds,) = instruments.rank_group.all_reduce_max(training.begin())
            is_long = step_seconds > LONG_STEP_SECONDS[instruments.device.type]
            meter.reset_peak()
            if not (cuda and is_long):  # on a host, the meter must see a step with the optimizer's state
                step_seconds = _step_seconds(instruments, training)
            peak = meter.peak()
    if not cuda and compiles and not is_long:
        with clock.phase("warm_up"):
            training.step()  # without the meter, which prevents compilation
            step_seconds = _step_seconds(instruments, training)
    (step_seconds,) = instruments.rank_group.all_reduce_max(step_seconds)
    timed_seconds = TIMED_SECONDS[instruments.device.type]
    with clock.phase("timed"), instruments.monitor.watch() as watch, collector_paused():
        marks = [training.step()] if is_long else []
        if cuda and is_long:  # or its first micro-step alone, in which code is compiled
            instruments.synchronize()
            (step_seconds,) = instruments.rank_group.all_reduce_max(marks[0][0].seconds_until(marks[0][-1]))
            is_long = step_seconds > LONG_STEP_SECONDS["cuda"]
        if not is_long:
            num_steps = max(MIN_STEPS, min(most_steps, int(timed_seconds / step_seconds)))
            marks = []
            for _ in range(num_steps):
                marks.append(training.step())
                watch.poll()  # between the marks of two steps
        training.finish()
    reserved = peak
    if cuda:
        peak = max(peak, meter.peak()) + training.graph_bytes
        reserved = torch.cuda.max_memory_reserved(instruments.device)
    return TimedSteps(training, marks, peak - instruments.own_bytes, reserved, watch)


def _step_error(marks: Sequence[Sequence[Mark]], micro_steps: list[float], batches: TextBatches | None) -> float:
    each = [_micro_steps(moments) for moments in marks]
    scatter = standard_error(micro_steps) if len(each) > 1 else standard_error(each[0][:2])
    if batches is None or not batches.varies:
        return scatter
    unknown = statistics.median(batches.expect(own)[1] for _, *own in each)
    return math.hypot(scatter if len(each) > 1 else 0.0, unknown)


def _split_texts(steps: Sequence[Sequence[Mark]], batches: TextBatches) -> tuple[list[float], list[float]]:
    """Seconds of a micro-step of each step in the mean over an epoch, and the first one's seconds beyond its equal's.

    A step runs `batches.measured` after one of them, which comes first because the device may still run the optimizer.
    """
    each = [_micro_steps(moments) for moments in steps]
    return [batches.expect(own)[0] for _, *own in each], [first - own[0] for first, *own in each]


def _summarize(
    run: TimedSteps[TrainingRun], request: ExplorationRequest, candidate: Candidate
) -> WholeModelMeasurement:
    marks, training = run.marks, run.training
    batches = text_batches(request, candidate.micro_batch_size)
    micro_steps, once = _split(marks) if batches is None else _split_texts(marks, batches)
    optimizer = [before.seconds_until(end) for *_, before, end in marks]
    if not training.is_data_parallel:  # time that the first micro-step lacks belongs to the optimizer
        optimizer = [max(0.0, seconds + more) for seconds, more in zip(optimizer, once, strict=True)]
    return WholeModelMeasurement(
        micro_step_seconds=statistics.median(micro_steps),
        optimizer_seconds=statistics.median(optimizer) if request.mode == "train" else 0.0,
        standard_error_seconds=_step_error(marks, micro_steps, batches),
        peak_bytes=run.peak_bytes,
        reserved_bytes=run.reserved_bytes,
        repeats=len(marks),
        communication_seconds=max(0.0, statistics.median(once)) if training.is_data_parallel else None,
        conditions=run.watch.conditions(),
    )
