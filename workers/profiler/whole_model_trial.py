"""Runs the whole model as a trainer would, to check what its components compose to."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from explorer.candidates import Candidate
from explorer.measurements import WholeModelMeasurement
from explorer.models import ModelSpec
from explorer.requests import ExplorationRequest
from explorer.training import Sharding
from workers.layers.decoder import DecoderModel
from workers.layers.factory import random_tokens
from workers.layers.optimizer import TrainingOptimizer, build_optimizer
from workers.profiler.bench import Bench
from workers.profiler.failures import UnsupportedTrialError
from workers.profiler.meters import byte_meter
from workers.profiler.phases import PhaseClock
from workers.profiler.rings import find_ring
from workers.profiler.timing import collector_paused, standard_error

MICRO_STEPS = 2
MIN_STEPS = 3
MAX_STEPS = 10
TIMED_SECONDS = 3.0


class _Mark(Protocol):
    """A moment on the device."""

    def seconds_until(self, later: _Mark) -> float: ...


@dataclass(frozen=True, slots=True)
class _HostMark:
    at: float = field(default_factory=time.perf_counter)

    def seconds_until(self, later: _Mark) -> float:
        assert isinstance(later, _HostMark)
        return later.at - self.at


class _CudaMark:
    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def seconds_until(self, later: _Mark) -> float:
        assert isinstance(later, _CudaMark)
        return float(self._event.elapsed_time(later._event)) / 1e3


class _Training:
    """A model with its optimizer and two micro-batches. Eval mode has no optimizer and no backward.

    The processes of a team have the same parameters. Those of a ring share the sequences of a micro-batch, each ring
    has sequences of its own. After the last backward the gradients are averaged over the team, tensor by tensor and
    with nothing beside it: no more than plain data parallelism, without buckets and without overlap.
    """

    def __init__(self, bench: Bench, model: ModelSpec, candidate: Candidate, request: ExplorationRequest) -> None:
        generator = bench.generator(request.seed)
        self._trains = request.mode == "train"
        self._mark: Callable[[], _Mark] = _CudaMark if bench.device.type == "cuda" else _HostMark
        self._team = bench.team
        size, layout = candidate.context_parallel_size, candidate.context_parallel_layout
        ranks = find_ring(bench, model, size, layout, candidate.attention_backend)
        self.decoder = DecoderModel(
            model, candidate, request, bench.device, generator=generator, context_parallel=ranks
        )
        self.optimizer: TrainingOptimizer | None = None
        if self._trains:
            parameters = self.decoder.parameters()
            self.optimizer = build_optimizer(parameters, request.training.optimizer, model.dtype)
        shape = (candidate.micro_batch_size, model.seq_length)
        ring = self._team.rank // size
        drawn = bench.generator(request.seed + 1 + ring) if self._team.size > 1 else generator

        def tokens() -> Tensor:
            whole = random_tokens(model, shape, bench.device, drawn)
            return whole if ranks is None else ranks.shard(whole)

        self._batches: list[tuple[Tensor, Tensor]] = [(tokens(), tokens()) for _ in range(MICRO_STEPS)]

    def step(self) -> tuple[_Mark, _Mark, _Mark]:
        """One step; returns the moments before it, before the optimizer, and after it.

        The exchange of gradients happens once a step, as the optimizer does, and counts with it.
        """
        start = self._mark()
        for tokens, targets in self._batches:
            with torch.set_grad_enabled(self._trains):
                loss = self.decoder(tokens, targets)
            if self._trains:
                (loss / MICRO_STEPS).backward()
            del loss
        before_optimizer = self._mark()
        if self.optimizer is not None:
            self._team.average(gradient for gradient in self.optimizer.gradients if gradient is not None)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return start, before_optimizer, self._mark()


def _step_seconds(bench: Bench, training: _Training) -> float:
    started = time.perf_counter()
    training.step()
    bench.synchronize()
    return time.perf_counter() - started


def run_whole_model(
    bench: Bench, model: ModelSpec, candidate: Candidate, request: ExplorationRequest, clock: PhaseClock
) -> WholeModelMeasurement:
    """Train a few steps of two accumulated micro-steps, back to back, or run forwards alone in eval mode.

    Raises:
        UnsupportedTrialError: the training state is sharded, or sequences cannot be shared as the candidate says.
    """
    if request.training.sharding is not Sharding.NONE and request.mode == "train":
        others = "has one" if bench.team.size == 1 else "runs whole models with all their state on each"
        raise UnsupportedTrialError(
            f"a whole model with sharding '{request.training.sharding}' needs {request.num_devices} devices; "
            f"the profiler {others}"
        )
    bench.settle(release=True)
    with byte_meter(bench.device, ()) as meter:
        with clock.phase("build"):
            training = _Training(bench, model, candidate, request)
        with clock.phase("warm_up"):
            training.step()
            bench.synchronize()
            meter.reset_peak()
            step_seconds = _step_seconds(bench, training)
            peak = meter.peak()
    if bench.device.type == "cpu":
        with clock.phase("warm_up"):
            training.step()  # the meter slows the host down, and keeps it from compiling
            step_seconds = _step_seconds(bench, training)
    (step_seconds,) = bench.team.largest(step_seconds)
    num_steps = max(MIN_STEPS, min(MAX_STEPS, int(TIMED_SECONDS / step_seconds)))
    with clock.phase("timed"), bench.surroundings.watch() as watch, collector_paused():
        marks = []
        for _ in range(num_steps):
            marks.append(training.step())
            watch.glance()  # between the marks of two steps
        bench.synchronize()
    reserved = peak
    if bench.device.type == "cuda":
        peak = max(peak, meter.peak())
        reserved = torch.cuda.max_memory_reserved(bench.device)
    peak -= bench.own_bytes
    micro_steps = [start.seconds_until(before) / MICRO_STEPS for start, before, _ in marks]
    optimizer = [before.seconds_until(end) for _, before, end in marks]
    return WholeModelMeasurement(
        micro_step_seconds=statistics.median(micro_steps),
        optimizer_seconds=statistics.median(optimizer) if request.mode == "train" else 0.0,
        standard_error_seconds=standard_error(micro_steps),
        peak_bytes=peak,
        reserved_bytes=reserved,
        repeats=num_steps,
        conditions=watch.conditions(),
    )
