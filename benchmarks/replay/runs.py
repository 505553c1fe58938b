"""One search on one table with one seed, and many of them over processes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from multiprocessing import get_context
from pathlib import Path
from typing import Protocol

from benchmarks.replay import strategies
from benchmarks.replay.bench import TrialBench
from benchmarks.replay.drawn_truth import DrawnTruth
from benchmarks.replay.ground_truth import GroundTruth
from benchmarks.replay.strategies import Strategy
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.event import EventCode
from bexp.explorer.records.measurement import Measurement, Outcome
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.records.trial import Measure, TrialKind, TrialTask
from bexp.explorer.search.explore import explore
from bexp.explorer.search.pruned_space import PrunedSpace
from bexp.explorer.search.samplers import STOCK_SAMPLERS
from bexp.explorer.search.trial_executor import TrialExecutor
from bexp.explorer.spec.candidate import Candidate
from bexp.explorer.spec.request import ExplorationRequest
from bexp.workers.replay.device import RecordedDevice, VirtualClock
from bexp.workers.replay.recording import Recording

OURS = "bexp"
SAMPLERS = (OURS, *STOCK_SAMPLERS)
"""The samplers that a request can name. All of them run through the product's search."""
STRATEGIES: Mapping[str, Strategy] = {
    "powers of two": strategies.powers_of_two,
    "backing off from the top": strategies.backing_off_from_the_top,
    "largest that fits": strategies.largest_that_fits,
    "deepspeed fast": strategies.deepspeed_fast,
    "coordinate descent": strategies.coordinate_descent,
    "exhaustive": strategies.exhaustive,
}
MOST_SEEDS = {"tpe": 10, "random": 10, "gp": 10, "exhaustive": 5}
"""Of the slow ones, on a table."""


@dataclass(frozen=True, slots=True)
class Line:
    """A BEXP202 line: its confidence, whether it was right, and after how many device seconds it came."""

    confidence: int
    within_tolerance: bool
    at_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """How one search ended.

    `seconds` are the device's, whole-model checks apart (`check_seconds`). `path` holds what would have been trained
    with after each trial: (seconds so far, regret). `elapsed_seconds` is how long the search took until its first
    whole-model check; with several trials in flight it is less than the `seconds` that the devices were busy.
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
    path: tuple[tuple[float, float], ...]
    lines: tuple[Line, ...]
    wall_seconds: float
    candidate: str | None
    elapsed_seconds: float = 0.0


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


def run_search(truth: GroundTruth, seed: int, in_flight: int = 1, sampler: str = OURS) -> Run:
    """The product's search, in virtual time, on as many recorded devices as it may have trials in flight."""
    clock = VirtualClock()
    device = RecordedDevices(truth.recording, in_flight, seed=seed, clock=clock) if in_flight > 1 else None
    return search(truth, seed, device or truth.device(seed, clock), clock, sampler=sampler)


def search(truth: SearchTruth, seed: int, device: Measure, clock: VirtualClock, *, sampler: str = OURS) -> Run:
    """The product's search on a device whose time is `clock`, judged by the truth."""
    request = truth.request.model_copy(update={"seed": seed, "sampler": sampler})
    started = time.perf_counter()
    trials, lines, path = [], [], []
    recommendation: Recommendation | None = None
    seconds = checked = 0.0
    checks_began = math.inf
    for step in explore(request, truth.report, device, clock=clock, prune=lambda *_: truth.prune):
        if step.trial is not None:
            trials.append(step.trial)
            if step.trial.kind is TrialKind.COMPONENTS:
                seconds += step.trial.seconds
            else:
                checked += step.trial.seconds
                checks_began = min(checks_began, clock() - step.trial.seconds)
        recommendation = step.recommendation
        if recommendation is not None and any(event.code is EventCode.RECOMMENDATION for event in step.events):
            lines.append(Line(recommendation.confidence, truth.is_within_tolerance(recommendation.candidate), seconds))
        if step.trial is not None and step.trial.kind is TrialKind.COMPONENTS:
            path.append((seconds, truth.regret(recommendation.candidate if recommendation else None)))
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
        path=tuple(path),
        lines=tuple(lines),
        wall_seconds=time.perf_counter() - started,
        candidate=recommendation.candidate.describe() if recommendation else None,
        elapsed_seconds=min(checks_began, clock()),
    )


def run_strategy(truth: GroundTruth, name: str, seed: int) -> Run:
    """Run one of the other strategies."""
    bench = TrialBench(truth, seed)
    started = time.perf_counter()
    chosen = STRATEGIES[name](bench, seed)
    wall = time.perf_counter() - started
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
        path=tuple(_path(bench)),
        lines=(),
        wall_seconds=wall,
        candidate=chosen.describe() if chosen is not None else None,
    )


def run_all(
    paths: Iterable[Path], names: Iterable[str], seeds: Mapping[str, int], processes: int, *, drawn: bool = False
) -> Iterator[Run]:
    """Every strategy of `names` on every table with its number of seeds, as they finish.

    Each seed has a truth of its own if truths are `drawn`.
    """
    tasks = [
        (path, name, tuple(range(first, min(first + 10, seeds[name]))), drawn)
        for name in names
        for path in paths
        for first in range(0, seeds[name], 10)
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


def _path(bench: TrialBench) -> Iterator[tuple[float, float]]:
    """For the others: the fastest so far."""
    best: tuple[float, Candidate] | None = None
    for trial in bench.tries:
        if trial.row is not None and trial.tokens_per_second is not None:
            candidate = bench.truth.table.candidates[trial.row]
            if best is None or trial.tokens_per_second > best[0]:
                best = (trial.tokens_per_second, candidate)
        yield trial.at_seconds, bench.truth.regret(best[1] if best else None)


class RecordedDevices(TrialExecutor):
    """A device for each trial in flight. `clock` advances to the end of each trial that is waited for.

    Every device gives the same answer for a component as `RecordedDevice` does.
    """

    def __init__(self, recording: Recording, number: int, *, seed: int, clock: VirtualClock) -> None:
        if number < 1:
            raise ValueError("there must be at least one device")
        self._idle = [RecordedDevice(recording, seed=seed) for _ in range(number)]
        self._capacity = number
        self._clock = clock
        self._running: list[tuple[float, int, TrialTask, Measurement, RecordedDevice]] = []

    @property
    def capacity(self) -> int:
        """The number of devices."""
        return self._capacity

    def submit(self, task: TrialTask) -> None:
        """Give a trial to the device that became idle last."""
        device = self._idle.pop()
        measurement = device(task)
        heappush(self._running, (self._clock() + measurement.phases.total, task.number, task, measurement, device))

    def wait(self) -> tuple[TrialTask, Measurement]:
        """Return the trial that ends first. If several end together, the lowest number comes first."""
        ends, _, task, measurement, device = heappop(self._running)
        self._idle.append(device)
        self._clock.advance(max(0.0, ends - self._clock()))
        return task, measurement
