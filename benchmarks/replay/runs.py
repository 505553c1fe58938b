"""One search on one table with one seed, and many of them over processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from benchmarks.recorded_candidates import arrays_of, composed_tokens_per_second
from benchmarks.replay.ground_truth import DrawnTruth, GroundTruth
from bexp.explorer.cost.components import Component
from bexp.explorer.cost.composition import required_table
from bexp.explorer.cost.step import memory_limit
from bexp.explorer.dimensions.bta_tile import BTA_TILE
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.event import EventCode
from bexp.explorer.records.measurement import ComponentMeasurement, Outcome
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.records.trial import Measure, TrialKind, TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.explore import explore
from bexp.explorer.search.legal_space import PrunedSpace
from bexp.explorer.search.samplers import STOCK_SAMPLERS
from bexp.workers.replay.profiler import VirtualClock


@dataclass(frozen=True, slots=True)
class Try:
    """A candidate that was tried, and when: its composed tokens/s are None if it failed or is too large."""

    row: int | None
    tokens_per_second: float | None
    at_seconds: float


class TrialBench:
    """Tries candidates one after another. Equal components of different candidates are measured once."""

    def __init__(self, truth: GroundTruth, seed: int) -> None:
        self.truth = truth
        self.clock = VirtualClock()
        self.device = truth.device(seed, self.clock)
        self.tries: list[Try] = []
        self._measured: dict[Component, ComponentMeasurement] = {}
        self._failed: set[Component] = set()
        self._limit = memory_limit(truth.request, truth.report.hardware)

    @property
    def num_out_of_memory(self) -> int:
        """Tries that did not fit, or failed."""
        return sum(t.tokens_per_second is None for t in self.tries)

    def row(self, candidate: Candidate) -> int | None:
        """The row of a legal candidate that may fit; None for any other."""
        row = self.truth.table.row.get(candidate)
        return row if row is not None and self.truth.legal_C[row] else None

    def refuse(self) -> None:
        """Count a try that would have run out of memory by prediction. It costs no seconds here."""
        self.tries.append(Try(None, None, self.clock()))

    def run(self, row: int) -> float | None:
        table = self.truth.table
        missing = tuple(c for c in table.decompositions[row].components if c not in self._measured)
        failed = any(c in self._failed for c in missing)
        if missing and not failed:
            task = TrialTask(
                number=len(self.tries),
                kind=TrialKind.COMPONENTS,
                model=table.model,
                candidate=table.candidates[row],
                components=missing,
                timeout_seconds=self.truth.request.budget.trial_timeout_seconds,
            )
            measurement = self.device(task)
            self._measured |= {m.component: m for m in measurement.components}
            if measurement.outcome is not Outcome.OK:
                failed = True
                if measurement.failed_component is not None:
                    self._failed.add(measurement.failed_component)
        tokens = None if failed else self._compose(row)
        self.tries.append(Try(row, tokens, self.clock()))
        return tokens

    def fastest(self) -> Candidate | None:
        well = [(t.tokens_per_second, t.row) for t in self.tries if t.tokens_per_second is not None]
        _, row = max(well, key=lambda pair: pair[0], default=(0.0, None))
        return None if row is None else self.truth.table.candidates[row]

    def _compose(self, row: int) -> float | None:
        """Tokens/s of a candidate from its measured components, as the product composes them; None if too large."""
        table = self.truth.single(row)
        hardware = self.truth.report.hardware
        figures = arrays_of(table, self._measured, host_is_device=hardware.device_kind == "cpu")
        activations = np.add(*table.activation_bytes(*figures.sizes))
        if required_table(table, activations, hardware)[0] > self._limit:
            return None
        return float(composed_tokens_per_second(table, figures)[0])


T = TypeVar("T")
Strategy = Callable[[TrialBench, int], Candidate | None]
"""Tries candidates on a bench with a seed; returns the one that it would train with."""

BACK_OFF = 0.9  # of accelerate.utils.find_executable_batch_size
DEEPSPEED_NUM_SIZES = 3  # num_tuning_micro_batch_sizes of DeepSpeed's autotuner
SIZE = ("micro_batch_size",)
SETTINGS = (
    SIZE,
    *(("expert_backend",), ("attention_backend",), ("recompute",), ("bta_tile",), ("loss",), ("execution",)),
    *(("kernels",), ("settings",), ("sharding",), ("context_parallel_size", "context_parallel_layout")),
)
"""What a coordinate descent changes, one after another. On the recorded tables no other order that was tried is
cheaper, and none has less regret."""


def powers_of_two(bench: TrialBench, _: int) -> Candidate | None:
    """Double the micro-batch until it does not fit, and take the last that did (Lightning's BatchSizeFinder)."""
    fitting = None
    for size in (m for m in _sizes(bench.truth) if m & (m - 1) == 0):
        candidate = _plain(bench.truth, size)
        if _try(bench, candidate) is None:
            break
        fitting = candidate
    return fitting


def backing_off_from_the_top(bench: TrialBench, _: int) -> Candidate | None:
    """Start at the largest micro-batch and back off by a factor of 0.9 until one fits.

    This is what Accelerate's find_executable_batch_size has done since July 2025. A size that is not legal stands for
    the next smaller legal one.
    """
    sizes = _sizes(bench.truth)
    size = sizes[-1]
    while True:
        candidate = _plain(bench.truth, size)
        if _try(bench, candidate) is not None:
            return candidate
        smaller = [m for m in sizes if m <= int(BACK_OFF * size)]
        if not smaller:
            return None
        size = smaller[-1]


def largest_that_fits(bench: TrialBench, _: int) -> Candidate | None:
    """The largest micro-batch that fits, by bisection (Composer's automatic microbatching)."""
    size = _largest(bench)
    return None if size is None else _plain(bench.truth, size)


def deepspeed_fast(bench: TrialBench, _: int) -> Candidate | None:
    """Find the largest size that fits, try a few evenly spaced below it, take the fastest (DeepSpeed's fast mode)."""
    largest = _largest(bench)
    if largest is None:
        return None
    sizes = _sizes(bench.truth)
    for target in np.linspace(sizes[0], largest, DEEPSPEED_NUM_SIZES):
        nearest = min(sizes, key=lambda m: (abs(m - float(target)), m))
        _try(bench, _plain(bench.truth, nearest))
    return bench.fastest()


def coordinate_descent(bench: TrialBench, _: int) -> Candidate | None:
    """Start at the base and change one setting at a time, until no change of one is faster.

    Of the sizes, it finds the largest that fits by bisection, and walks down from there while that is faster. Of any
    other setting, it tries each value.
    """
    truth = bench.truth
    legal = [truth.table.candidates[row] for row in np.flatnonzero(truth.legal_C)]
    speeds: dict[Candidate, float] = {}

    def speed(candidate: Candidate) -> float:
        if candidate not in speeds:
            speeds[candidate] = bench.run(truth.table.row[candidate]) or 0.0
        return speeds[candidate]

    best = next(c for c in (*truth.prune.bases, *legal) if bench.row(c) is not None)
    before = None
    while best != before:
        before = best
        for names in SETTINGS:
            others = [name for name in Candidate.model_fields if name not in names]
            near = [c for c in legal if all(getattr(c, name) == getattr(best, name) for name in others)]
            if names == SIZE:
                near = [_walk_sizes(sorted(near, key=lambda c: c.micro_batch_size), best, speed)]
            best = max((best, *near), key=speed)
    return best if speed(best) > 0 else None


def _try(bench: TrialBench, candidate: Candidate) -> float | None:
    row = bench.row(candidate)
    if row is None:
        bench.refuse()
        return None
    return bench.run(row)


def _walk_sizes(ladder: Sequence[Candidate], start: Candidate, speed: Callable[[Candidate], float]) -> Candidate:
    """Return the largest that fits, from `start` on, or the first below it whose next smaller one is not faster."""
    first = ladder.index(start)
    at = first + max(0, _bisect(ladder[first:], lambda candidate: speed(candidate) > 0))
    while at > 0 and speed(ladder[at - 1]) > speed(ladder[at]):
        at -= 1
    return ladder[at]


def _largest(bench: TrialBench) -> int | None:
    """The largest legal size whose plain candidate fits, if fitting is monotonous."""
    sizes = _sizes(bench.truth)
    at = _bisect(sizes, lambda size: _try(bench, _plain(bench.truth, size)) is not None)
    return sizes[at] if at >= 0 else None


def _bisect(ladder: Sequence[T], fits: Callable[[T], bool]) -> int:
    """Where the last that fits is, if fitting is monotonous; -1 if none does."""
    low, high = -1, len(ladder)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(ladder[middle]):
            low = middle
        else:
            high = middle
    return low


def _sizes(truth: GroundTruth) -> tuple[int, ...]:
    return truth.request.space.micro_batch_sizes


def _plain(truth: GroundTruth, size: int) -> Candidate:
    """Return the plainest settings that the request allows."""
    request, report = truth.request, truth.report
    policies = request.space.recompute_policies
    attention = request.attention_backends
    experts = request.expert_backends
    default_experts = report.default_experts if request.shapes.moe is not None else None
    return Candidate(
        micro_batch_size=size,
        bta_tile=next(iter(BTA_TILE.considered_for(size, request.space.place)), None),
        recompute=Recompute.NONE if Recompute.NONE in policies else policies[0],
        attention_backend=report.default_attention
        if attention is None or report.default_attention in attention
        else attention[0],
        expert_backend=default_experts if experts is None or default_experts in experts else experts[0],
        num_query_groups=request.shapes.query_groups,
    )


OURS = "bexp"
SAMPLERS = (OURS, *STOCK_SAMPLERS)
"""The samplers that a request can name. All of them run through the product's search."""
STRATEGIES: Mapping[str, Strategy] = {
    "powers of two": powers_of_two,
    "backing off from the top": backing_off_from_the_top,
    "largest that fits": largest_that_fits,
    "deepspeed fast": deepspeed_fast,
    "coordinate descent": coordinate_descent,
}


@dataclass(frozen=True, slots=True)
class Line:
    """A BEXP202 line: its confidence, whether it was right, and after how many device seconds it came."""

    confidence: int
    within_tolerance: bool
    at_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """How one search ended.

    `seconds` are the device's, whole-model checks apart (`check_seconds`).
    """

    table: str
    strategy: str
    seed: int
    regret: float
    num_trials: int
    seconds: float
    check_seconds: float
    num_out_of_memory: int
    num_unrecorded: int
    confidence: int | None
    lines: tuple[Line, ...]
    candidate: str | None


class SearchTruth(Protocol):
    """What a search explores, and what is true of its recommendations."""

    @property
    def name(self) -> str:
        """The name of the table or of the device."""

    @property
    def request(self) -> ExplorationRequest:
        """What is explored."""

    @property
    def report(self) -> DeviceReport:
        """The device."""

    @property
    def prune(self) -> PrunedSpace:
        """The space."""

    def regret(self, candidate: Candidate | None) -> float:
        """Share of the best throughput that a recommendation gives away."""

    def is_within_tolerance(self, candidate: Candidate) -> bool:
        """Whether a candidate is within the tolerance of the best."""


def run_search(truth: GroundTruth, seed: int, sampler: str = OURS) -> Run:
    """The product's search in virtual time."""
    clock = VirtualClock()
    return search(truth, seed, truth.device(seed, clock), clock, sampler=sampler)


def search(truth: SearchTruth, seed: int, device: Measure, clock: VirtualClock, *, sampler: str = OURS) -> Run:
    """The product's search on a device whose time is `clock`, judged by the truth."""
    request = truth.request.model_copy(update={"seed": seed, "sampler": sampler})
    trials, lines = [], []
    recommendation: Recommendation | None = None
    seconds = checked = 0.0
    for step in explore(request, truth.report, device, clock=clock, prune=lambda *_: truth.prune):
        if step.trial is not None:
            trials.append(step.trial)
            if step.trial.kind is TrialKind.COMPONENTS:
                seconds += step.trial.seconds
            else:
                checked += step.trial.seconds
        recommendation = step.recommendation
        if recommendation is not None and any(event.code is EventCode.RECOMMENDATION for event in step.events):
            lines.append(Line(recommendation.confidence, truth.is_within_tolerance(recommendation.candidate), seconds))
    failures = [t.measurement for t in trials if t.measurement.outcome is not Outcome.OK]
    searched = [t for t in trials if t.kind is TrialKind.COMPONENTS]
    return Run(
        table=truth.name,
        strategy=sampler,
        seed=seed,
        regret=truth.regret(recommendation.candidate if recommendation else None),
        num_trials=len(searched),
        seconds=seconds,
        check_seconds=checked,
        num_out_of_memory=sum(m.outcome is Outcome.OUT_OF_MEMORY for m in failures),
        num_unrecorded=sum(m.outcome is Outcome.UNSUPPORTED and m.failed_component is not None for m in failures),
        confidence=recommendation.confidence if recommendation else None,
        lines=tuple(lines),
        candidate=recommendation.candidate.describe() if recommendation else None,
    )


def run_strategy(truth: GroundTruth, name: str, seed: int) -> Run:
    bench = TrialBench(truth, seed)
    chosen = STRATEGIES[name](bench, seed)
    return Run(
        table=truth.name,
        strategy=name,
        seed=seed,
        regret=truth.regret(chosen),
        num_trials=len(bench.tries),
        seconds=bench.clock(),
        check_seconds=0.0,
        num_out_of_memory=bench.num_out_of_memory,
        num_unrecorded=0,
        confidence=None,
        lines=(),
        candidate=chosen.describe() if chosen is not None else None,
    )


def run_all(
    paths: Iterable[Path], names: Iterable[str], seeds: int, processes: int, *, drawn: bool = False
) -> Iterator[Run]:
    """Every strategy of `names` on every table with so many seeds, as they finish.

    Each seed has a truth of its own if truths are `drawn`.
    """
    tasks = [
        (path, name, tuple(range(first, min(first + 10, seeds))), drawn)
        for name in names
        for path in paths
        for first in range(0, seeds, 10)
    ]
    if processes == 1:
        for task in tasks:
            yield from _run_task(*task)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for runs in pool.map(_run_task, *zip(*tasks, strict=True)):
            yield from runs


def _run_task(path: Path, name: str, seeds: tuple[int, ...], drawn: bool) -> list[Run]:
    recorded = read_truth(path)
    runs = []
    for seed in seeds:
        truth = DrawnTruth.draw(recorded, seed) if drawn else recorded
        run = run_search(truth, seed, sampler=name) if name in SAMPLERS else run_strategy(truth, name, seed)
        runs.append(run)
    return runs


@lru_cache(maxsize=16)
def read_truth(path: Path) -> GroundTruth:
    """The truth of a file, kept for the next run on it."""
    return GroundTruth.read(path)
