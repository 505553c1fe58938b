"""Runs the whole model as a trainer would, to check what its components compose to."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from explorer.candidates import Candidate
from explorer.measurements import WholeModelMeasurement
from explorer.models import ModelSpec
from explorer.requests import ExplorationRequest
from explorer.training import Sharding
from workers.kernels.dtypes import torch_dtype
from workers.layers.decoder import DecoderModel
from workers.layers.factory import random_tokens
from workers.layers.optimizer import TrainingOptimizer, build_optimizer
from workers.profiler.bench import Bench
from workers.profiler.failures import UnsupportedTrialError
from workers.profiler.marks import Mark, mark_of
from workers.profiler.meters import byte_meter
from workers.profiler.phases import PhaseClock
from workers.profiler.rings import find_ring
from workers.profiler.timing import collector_paused, standard_error
from workers.profiler.training.choice import data_parallel

MICRO_STEPS = 2
EXCHANGING_MICRO_STEPS = 3
"""The first, the last, and one between them, whose traffic is that of any other."""
MIN_STEPS = 3
MAX_STEPS = 10
TIMED_SECONDS = 3.0
LONG_STEP_SECONDS = 5.0
"""A step that takes so long is run once: what a first run adds is a small part of it, as is what repeats vary."""


class _Training:
    """A model with its optimizer and its micro-batches. Eval mode has no optimizer and no backward.

    The processes of a team have the same parameters and train together, sharded as the request says or replicated.
    Those of a ring share the sequences of a micro-batch, each ring has sequences of its own.
    """

    def __init__(self, bench: Bench, model: ModelSpec, candidate: Candidate, request: ExplorationRequest) -> None:
        generator = bench.generator(request.seed)
        self._bench = bench
        self._trains = request.mode == "train"
        self._mark = mark_of(bench.device)
        team, training = bench.team, request.training
        self.exchanges = self._trains and team.size > 1
        self._parallel = data_parallel(
            team.members if self.exchanges else None,
            bench.device,
            training.sharding,
            torch_dtype(model.dtype),
            torch_dtype(training.optimizer.gradient_dtype(model.dtype)),
        )
        size, layout = candidate.context_parallel_size, candidate.context_parallel_layout
        ranks = find_ring(bench, model, size, layout, candidate.attention_backend)
        decoder = DecoderModel(
            model,
            candidate,
            request,
            bench.device,
            generator=generator,
            context_parallel=ranks,
            take_unit=self._parallel.take,
        )
        self._model = self._parallel.wrap(decoder)
        self.optimizer: TrainingOptimizer | None = None
        if self._trains:
            self.optimizer = build_optimizer(decoder.parameters(), training.optimizer, model.dtype)
        shape = (candidate.micro_batch_size, model.seq_length)
        ring = team.rank // size
        drawn = bench.generator(request.seed + 1 + ring) if team.size > 1 else generator

        def tokens() -> Tensor:
            whole = random_tokens(model, shape, bench.device, drawn)
            return whole if ranks is None else ranks.shard(whole)

        number = EXCHANGING_MICRO_STEPS if self.exchanges else MICRO_STEPS
        self._batches: list[tuple[Tensor, Tensor]] = [(tokens(), tokens()) for _ in range(number)]

    def begin(self) -> float:
        """What a job does before its first step, and a step of one micro-step; returns seconds of a whole one."""
        seconds: list[float] = []

        def micro_step() -> None:
            self._bench.synchronize()
            started = time.perf_counter()
            self._micro_step(len(self._batches) - 1)
            self._bench.synchronize()
            seconds.append(time.perf_counter() - started)

        if self.optimizer is not None:
            self._parallel.prepare(self.optimizer, micro_step)  # may run some, and leave gradients
        if not seconds:
            micro_step()
        self._update()
        return seconds[-1] * len(self._batches)

    def step(self) -> list[Mark]:
        """One step; returns the moments before each micro-step, before the optimizer, and after it."""
        marks = [self._mark()]
        for i in range(len(self._batches)):
            self._micro_step(i)
            marks.append(self._mark())
        self._update()
        return [*marks, self._mark()]

    def finish(self) -> None:
        """After the last step."""
        self._bench.synchronize()
        self._parallel.finish()

    def _update(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _micro_step(self, number: int) -> None:
        tokens, targets = self._batches[number]
        with self._parallel.micro_step(is_last=number == len(self._batches) - 1):
            with torch.set_grad_enabled(self._trains):
                loss = self._model(tokens, targets)
            if self._trains:
                (loss / len(self._batches)).backward()
            del loss


def _step_seconds(bench: Bench, training: _Training) -> float:
    started = time.perf_counter()
    training.step()
    bench.synchronize()
    return time.perf_counter() - started


def _micro_steps(moments: Sequence[Mark]) -> list[float]:
    """Seconds of each micro-step of a step."""
    return [start.seconds_until(end) for start, end in pairwise(moments[:-1])]


def _split(steps: Sequence[Sequence[Mark]]) -> tuple[list[float], list[float]]:
    """Seconds of a micro-step of each step, and what all of them took beyond that.

    The second one is typical. Where the host is slower than the device, the first seems shorter than it is: it began
    when the device had caught up with the optimizer, which the host had left behind.
    """
    micro_steps, once = [], []
    for moments in steps:
        each = _micro_steps(moments)
        typical = each[1]
        micro_steps.append(typical)
        once.append(sum(each) - len(each) * typical)
    return micro_steps, once


def run_whole_model(
    bench: Bench, model: ModelSpec, candidate: Candidate, request: ExplorationRequest, clock: PhaseClock
) -> WholeModelMeasurement:
    """Train a few steps of accumulated micro-steps, back to back, or run forwards alone in eval mode.

    Raises:
        UnsupportedTrialError: the training state is sharded over more devices than there are, or sequences cannot be
            shared as the candidate says.
    """
    sharded = request.training.sharding is not Sharding.NONE and request.mode == "train"
    if sharded and bench.team.size < request.num_devices:
        has = "one" if bench.team.size == 1 else f"{bench.team.size} of them"
        raise UnsupportedTrialError(
            f"a whole model with sharding '{request.training.sharding}' needs {request.num_devices} devices; "
            f"the profiler has {has}"
        )
    bench.settle(release=True)
    cuda = bench.device.type == "cuda"
    with byte_meter(bench.device, ()) as meter:
        with clock.phase("build"):
            training = _Training(bench, model, candidate, request)
        with clock.phase("warm_up"):
            (step_seconds,) = bench.team.largest(training.begin())
            is_long = cuda and step_seconds > LONG_STEP_SECONDS
            meter.reset_peak()
            if not is_long:
                step_seconds = _step_seconds(bench, training)
            peak = meter.peak()
    if not cuda:
        with clock.phase("warm_up"):
            training.step()  # the meter slows the host down, and keeps it from compiling
            step_seconds = _step_seconds(bench, training)
    (step_seconds,) = bench.team.largest(step_seconds)
    num_steps = 1 if is_long else max(MIN_STEPS, min(MAX_STEPS, int(TIMED_SECONDS / step_seconds)))
    with clock.phase("timed"), bench.surroundings.watch() as watch, collector_paused():
        marks = []
        for _ in range(num_steps):
            marks.append(training.step())
            watch.glance()  # between the marks of two steps
        training.finish()
    reserved = peak
    if cuda:
        peak = max(peak, meter.peak())
        reserved = torch.cuda.max_memory_reserved(bench.device)
    peak -= bench.own_bytes
    micro_steps, once = _split(marks)
    optimizer = [before.seconds_until(end) for *_, before, end in marks]
    if not training.exchanges:  # what the first micro-step lacks was the optimizer's
        optimizer = [max(0.0, seconds + more) for seconds, more in zip(optimizer, once, strict=True)]
    return WholeModelMeasurement(
        micro_step_seconds=statistics.median(micro_steps),
        optimizer_seconds=statistics.median(optimizer) if request.mode == "train" else 0.0,
        standard_error_seconds=standard_error(micro_steps if num_steps > 1 else _micro_steps(marks[0])[:2]),
        peak_bytes=peak,
        reserved_bytes=reserved,
        repeats=num_steps,
        communication_seconds=max(0.0, statistics.median(once)) if training.exchanges else None,
        conditions=watch.conditions(),
    )
