"""The communication of gradients and parameters in a step, and how much it slows computation down."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bexp.explorer.cost.collectives import BUCKET_BYTES, CommunicationUnits, Unit, buffered_dtype
from bexp.explorer.cost.components import Component
from bexp.explorer.model.model import DType
from bexp.explorer.model.parts import ExploredModel, ModelParts
from bexp.explorer.model.training import Sharding
from bexp.explorer.records.measurement import ComponentMeasurement
from bexp.explorer.request.request import ExplorationRequest
from bexp.measure.timestamps import mark_of
from bexp.measure.timing import Timing, collector_paused
from bexp.workers.instruments.device_instruments import Instruments
from bexp.workers.instruments.kernel_shapes import torch_dtype
from bexp.workers.instruments.phases import PhaseClock
from bexp.workers.targets.target import ProfiledTarget, TrainingRun
from bexp.workers.training.collectives import all_gather, reduce_scatter
from bexp.workers.training.data_parallel import DATA_PARALLEL_MICRO_STEPS

COMPUTE_TOKENS = 4096
"""Rows of the products that run during the communication; at most a sequence's length."""
OUTLASTS = 2.0
"""The time of the computation over the time of the communication during it, if each runs alone."""
LEAST_SECONDS = 4e-3
"""The least duration of the communication, which makes its beginning and its end negligible."""
MOST_BLOCKS = 4096
REPEATS = 5
SECONDS = 2.0
"""The seconds for the repeats, of which there are at least two."""


class _UnitCollectives:
    """The collectives of one unit in forward and backward, on buffers of the real sizes and dtypes.

    A timer treats it as a block: `forward` gathers, `backward` gathers and reduces, and each waits for the end.
    """

    training = True
    is_chainable = False

    def __init__(
        self,
        instruments: Instruments,
        members: dist.ProcessGroup,
        model: ExploredModel,
        request: ExplorationRequest,
        unit: Unit,
        barrier: Callable[[], None] | None,
        *,
        is_last: bool,
    ) -> None:
        self._members = members
        self._barrier = barrier
        self._sharding = request.training.sharding
        self._in_buckets = request.devices.hold_buckets
        self._again = self._sharding is Sharding.ZERO3 and not is_last
        ranks = members.size()
        share, reduced = -(-unit.num_parameters // ranks), -(-unit.num_gradients // ranks)
        # A mean of equal tensors never grows, even if it is taken many times. gloo has no mean.
        self._mean = dist.ReduceOp.AVG if instruments.device.type == "cuda" else dist.ReduceOp.SUM
        generator = instruments.generator(request.seed)

        def draw(size: int, dtype: DType) -> Tensor:
            empty = torch.empty(size, dtype=torch_dtype(dtype), device=instruments.device)
            return empty.normal_(0.0, 1e-3, generator=generator)

        gradient_dtype = buffered_dtype(model, request)
        self._gradients = draw(ranks * reduced, gradient_dtype)
        if self._sharding is Sharding.NONE:
            self._buckets = self._gradients.split(max(1, BUCKET_BYTES // gradient_dtype.itemsize)) if reduced else ()
            return
        self._reduced = draw(reduced, gradient_dtype)
        self._shard = draw(share, model.dtype)
        self._parameters = draw(ranks * share, model.dtype)

    def begin_forward(self) -> list[Any]:
        """Issue the collectives of forward, without waiting for them."""
        if self._sharding is Sharding.NONE:
            return []
        return [all_gather(self._parameters, self._shard, group=self._members, async_op=True)]

    def begin_backward(self) -> list[Any]:
        """Issue the collectives of backward, without waiting for them."""
        if self._sharding is Sharding.NONE:
            return [dist.all_reduce(bucket, self._mean, self._members, async_op=True) for bucket in self._buckets]
        gathered = self.begin_forward() if self._again else []
        if not self._reduced.numel():  # all parameters are frozen
            return gathered
        return [*gathered, reduce_scatter(self._reduced, self._gradients, self._mean, self._members, async_op=True)]

    def copy(self) -> None:
        """Make the copies for these collectives.

        Sharding copies gathered parameters out of a buffer, and gradients into one. Replicas reduce gradients in place,
        or copy them into buckets and back.
        """
        if self._in_buckets:
            self._gradients.clone()
            self._gradients.clone()
        if self._sharding is not Sharding.NONE:
            for _ in range(2 if self._again else 1):
                self._parameters.clone()
            self._gradients.clone()

    def prepare_forward(self) -> None:
        """Wait until all ranks are here."""
        if self._barrier is not None:
            self._barrier()

    def forward(self) -> None:
        """Run the collectives of forward."""
        _wait(self.begin_forward())

    def prepare_backward(self) -> None:
        """Wait until all ranks are here."""
        if self._barrier is not None:
            self._barrier()

    def backward(self) -> None:
        """Run the collectives of backward."""
        _wait(self.begin_backward())

    def run_chain(self, length: int) -> None:
        """Do nothing, because units are timed one at a time."""


@dataclass(frozen=True, slots=True)
class _CommunicatedUnit:
    unit: Unit
    is_last: bool


def measure_data_parallel_communication(
    instruments: Instruments,
    target: ProfiledTarget,
    model: ExploredModel,
    component: Component,
    request: ExplorationRequest,
    clock: PhaseClock,
) -> ComponentMeasurement:
    """Measure the collectives of gradients and parameters in one step of the whole model.

    The units are timed one after another, without computation at the same time. Equal layers are timed once. The
    slowdown of computation and the work of the host (see `measure_host_overhead`) are measured separately. All ranks
    must call this at the same time.
    """
    members = instruments.rank_group.members
    assert members is not None, "collectives need more than one process"
    units = CommunicationUnits.of(model)
    tied = units.last is None
    parts = [
        _CommunicatedUnit(units.first, is_last=tied),
        *(_CommunicatedUnit(layer, is_last=False) for layer in units.layers),
    ]
    if units.last is not None:
        parts.append(_CommunicatedUnit(units.last, is_last=True))
    replicated = request.training.sharding is Sharding.NONE  # frozen parameters are then not communicated
    largest = max(parts, key=lambda p: p.unit.count * (p.unit.num_gradients if replicated else p.unit.num_parameters))
    barrier = instruments.rank_group.barrier(component)
    timings: list[tuple[int, Timing]] = []
    slowdown = 0.0
    watch = instruments.monitor.watch()
    for part in parts:
        with clock.phase("build"):
            collectives = _UnitCollectives(
                instruments, members, model, request, part.unit, barrier, is_last=part.is_last
            )
        with clock.phase("warm_up"):
            instruments.timer.warm_up(collectives)
        with clock.phase("timed"), watch:
            timing = instruments.timer.time(collectives, watch.poll)
            if part is largest:
                slowdown = _measure_slowdown(instruments, model, collectives, timing)
        timings.append((part.unit.count, timing))
        del collectives
    with clock.phase("timed"):
        host_overhead = measure_host_overhead(instruments, target, model, request)
    return ComponentMeasurement(
        component=component,
        device_seconds=sum(count * timing.device_seconds for count, timing in timings),
        host_seconds=host_overhead.each,
        host_once_seconds=host_overhead.once,
        forward_device_seconds=sum(count * timing.forward_device_seconds for count, timing in timings),
        standard_error_seconds=math.hypot(*(count * timing.standard_error_seconds for count, timing in timings)),
        repeats=min(timing.repeats for _, timing in timings),
        saved_bytes=0,
        forward_peak_bytes=0,
        backward_peak_bytes=0,
        slowdown=slowdown,
        conditions=watch.conditions(),
    )


def _measure_slowdown(
    instruments: Instruments, model: ExploredModel, collectives: _UnitCollectives, timing: Timing
) -> float:
    """The seconds by which each second of communication delays computation, 0..1.

    Products of a layer's size run alone, and together with collectives that end before the products do. All collectives
    are issued first; the back end runs them on streams or threads of its own.
    """
    multiply = _products(instruments, model)
    (seconds,) = instruments.rank_group.all_reduce_max(timing.device_seconds)
    rounds = max(1, math.ceil(LEAST_SECONDS / seconds))
    _run(instruments, multiply, 4, collectives, rounds)  # the first run also warms up
    (block,) = instruments.rank_group.all_reduce_max(_run(instruments, multiply, 4) / 4)
    blocks = min(MOST_BLOCKS, max(1, math.ceil(OUTLASTS * rounds * seconds / block)))
    repeats = max(2, min(REPEATS, int(SECONDS / (2 * blocks * block))))
    lost = []
    with collector_paused():
        for _ in range(repeats):
            alone = _run(instruments, multiply, blocks)
            lost.append(_run(instruments, multiply, blocks, collectives, rounds) - alone)
    return min(1.0, max(0.0, statistics.median(lost) / (rounds * seconds)))


def _run(
    instruments: Instruments,
    multiply: Callable[[], None],
    blocks: int,
    collectives: _UnitCollectives | None = None,
    rounds: int = 0,
) -> float:
    """Seconds of the products during the collectives of `rounds` passes."""
    mark = mark_of(instruments.device, alone=False)
    instruments.rank_group.all_reduce_max(0.0)  # all ranks begin together
    instruments.synchronize()
    works: list[Any] = []
    for _ in range(rounds):
        assert collectives is not None
        works += [*collectives.begin_forward(), *collectives.begin_backward()]
    start = mark()
    for block in range(blocks):
        multiply()
        for _ in range(rounds * block // blocks, rounds * (block + 1) // blocks):
            assert collectives is not None
            collectives.copy()
    end = mark()
    _wait(works)
    instruments.synchronize()
    return start.seconds_until(end)


def _products(instruments: Instruments, model: ExploredModel) -> Callable[[], None]:
    """One matrix product into a hidden layer and one out of it."""
    dtype = torch_dtype(model.dtype)
    width, hidden = _widths(model)
    generator = instruments.generator(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=instruments.device, generator=generator)

    x_TD, w_DH = draw(min(COMPUTE_TOKENS, model.seq_length), width), draw(width, hidden)
    w_HD = draw(hidden, width)

    def multiply() -> None:
        x_TD @ w_DH @ w_HD

    return multiply


def _widths(model: ExploredModel) -> tuple[int, int]:
    """The width of the hidden states, and that of a layer's FFN; the latter has the FLOPs of a model's own layer."""
    if isinstance(model, ModelParts):
        width = max(1, model.output_bytes_per_token // model.dtype.itemsize)
        return width, max(1, round(max(kind.flops_per_token for kind in model.kinds) / (4 * width)))
    if model.moe is not None:
        return model.hidden_size, model.moe.top_k * model.moe.expert_ffn_hidden_size
    return model.hidden_size, model.ffn_hidden_size


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


STEPS = 5


@dataclass(frozen=True, slots=True)
class HostOverhead:
    """Seconds of the host: `each` in every micro-step, `once` more in the first and the last of a step together."""

    each: float
    once: float


def measure_host_overhead(
    instruments: Instruments, target: ProfiledTarget, model: ExploredModel, request: ExplorationRequest
) -> HostOverhead:
    """Measure the host's work in a step of the whole model. All ranks must call this at the same time."""
    number = CommunicationUnits.of(model).number
    seconds = []
    for together in (True, False):
        with target.miniature(model, request, together=together) as miniature:
            share = number / miniature.num_units
            seconds.append([share * each for each in _seconds(instruments, miniature.run)])
    each, once = (max(0.0, a - b) for a, b in zip(*seconds, strict=True))
    return HostOverhead(*instruments.rank_group.all_reduce_max(each, once))


def _seconds(instruments: Instruments, training: TrainingRun) -> tuple[float, float]:
    """Return host seconds in each micro-step, and additional ones once per step, as medians of several steps."""
    training.begin()
    each, once = [], []
    with collector_paused():
        for _ in range(STEPS):
            seconds = []
            instruments.rank_group.all_reduce_max(0.0)  # all begin together
            instruments.synchronize()
            for i in range(DATA_PARALLEL_MICRO_STEPS):
                started = time.perf_counter()
                training.micro_step(min(i, training.num_micro_steps - 1))
                seconds.append(time.perf_counter() - started)
            training.update()
            each.append(seconds[1])
            once.append(sum(seconds) - DATA_PARALLEL_MICRO_STEPS * seconds[1])
    training.finish()
    return statistics.median(each), statistics.median(once)
