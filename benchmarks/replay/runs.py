"""One search on one table with one seed, and many of them over processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Protocol

from benchmarks.replay import strategies
from benchmarks.replay.bench import TrialBench
from benchmarks.replay.drawn_truth import DrawnTruth
from benchmarks.replay.ground_truth import GroundTruth
from benchmarks.replay.strategies import Strategy
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.event import EventCode
from bexp.explorer.records.measurement import Outcome
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.records.trial import Measure, TrialKind
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.explore import explore
from bexp.explorer.search.legal_space import PrunedSpace
from bexp.explorer.search.samplers import STOCK_SAMPLERS
from bexp.workers.replay.profiler import VirtualClock

OURS = "bexp"
SAMPLERS = (OURS, *STOCK_SAMPLERS)
"""The samplers that a request can name. All of them run through the product's search."""
STRATEGIES: Mapping[str, Strategy] = {
    "powers of two": strategies.powers_of_two,
    "backing off from the top": strategies.backing_off_from_the_top,
    "largest that fits": strategies.largest_that_fits,
    "deepspeed fast": strategies.deepspeed_fast,
    "coordinate descent": strategies.coordinate_descent,
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
    """Run one of the other strategies."""
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
