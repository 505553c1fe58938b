"""Measures the host's work for communication in a step: hooks, copies, events, and issuing collectives.

If micro-batches are small, the device waits for this work. The work hardly depends on sizes, so it is measured on a
miniature of the model. The miniature has the same number of parameter tensors per layer, but almost nothing to compute
or to send. All ranks train it together, then each trains it alone. The difference is scaled to the model's number of
units.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from bexp.explorer.cost_model.collectives import ExchangeUnits
from bexp.explorer.spec.parts import ExploredModel
from bexp.explorer.spec.request import ExplorationRequest
from bexp.measure.timing import collector_paused
from bexp.workers.profiler.instruments import Instruments
from bexp.workers.profiler.training.data_parallel import EXCHANGING_MICRO_STEPS
from bexp.workers.targets.target import Target, TrainingRun

STEPS = 5


@dataclass(frozen=True, slots=True)
class HostOverhead:
    """Seconds of the host: `each` in every micro-step, `once` more in the first and the last of a step together."""

    each: float
    once: float


def measure_host_overhead(
    instruments: Instruments, target: Target, model: ExploredModel, request: ExplorationRequest
) -> HostOverhead:
    """The host's work in a step of the whole model. All ranks must call this at the same time."""
    number = ExchangeUnits.of(model).number
    seconds = []
    for together in (True, False):
        with target.miniature(model, request, together=together) as miniature:
            share = number / miniature.num_units
            seconds.append([share * each for each in _seconds(instruments, miniature.run)])
    each, once = (max(0.0, a - b) for a, b in zip(*seconds, strict=True))
    return HostOverhead(*instruments.rank_group.all_reduce_max(each, once))


def _seconds(instruments: Instruments, training: TrainingRun) -> tuple[float, float]:
    """Return host seconds in each micro-step, and additional ones once per step: medians of several steps."""
    training.begin()
    each, once = [], []
    with collector_paused():
        for _ in range(STEPS):
            seconds = []
            instruments.rank_group.all_reduce_max(0.0)  # all begin together
            instruments.synchronize()
            for i in range(EXCHANGING_MICRO_STEPS):
                started = time.perf_counter()
                training.micro_step(min(i, training.num_micro_steps - 1))
                seconds.append(time.perf_counter() - started)
            training.update()
            each.append(seconds[1])
            once.append(sum(seconds) - EXCHANGING_MICRO_STEPS * seconds[1])
    training.finish()
    return statistics.median(each), statistics.median(once)
