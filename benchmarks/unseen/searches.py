"""Runs the product's search on unseen devices, over processes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

from benchmarks.replay.calibration import CONFIDENT
from benchmarks.replay.runs import Line, search
from benchmarks.unseen.device import UnseenDevice
from benchmarks.unseen.truth import draw_truth
from bexp.workers.replay.profiler import VirtualClock

CHUNK = 5


@dataclass(frozen=True, slots=True)
class UnseenRun:
    """How one search ended.

    `regret_of_admitted` compares with the candidates that fit as composed, which are all that it may recommend.
    `fails_whole` says that the recommended candidate's whole model would run out of memory. `num_failed_checks` counts
    the whole models that did so before the answer. `seconds` are the device's without whole models.
    """

    seed: int
    num_candidates: int
    regret: float
    regret_of_admitted: float
    within_tolerance: bool
    confidence: int
    fails_whole: bool
    num_failed_checks: int
    num_trials: int
    seconds: float
    check_seconds: float
    lines: tuple[Line, ...]

    @property
    def is_without_answer(self) -> bool:
        """Whether nothing was recommended, although a candidate fits."""
        return self.regret >= 1.0 and not self.fails_whole

    @property
    def first_confident(self) -> Line | None:
        """The first line that is confident; None if none is."""
        return next((line for line in self.lines if line.confidence >= CONFIDENT), None)


def run_search(seed: int) -> UnseenRun:
    truth, clock = draw_truth(seed), VirtualClock()
    device = UnseenDevice(truth, seed, clock)
    run = search(truth, seed, device, clock)
    recommended = next((c for c in truth.table.candidates if c.describe() == run.candidate), None)
    return UnseenRun(
        seed=seed,
        num_candidates=len(truth.prune.legal.candidates),
        regret=run.regret,
        regret_of_admitted=truth.regret_of_admitted(recommended),
        within_tolerance=run.regret <= truth.request.tolerance,
        confidence=run.confidence or 0,
        fails_whole=run.candidate is not None and run.regret >= 1.0,
        num_failed_checks=device.num_out_of_memory,
        num_trials=run.num_trials,
        seconds=run.seconds,
        check_seconds=run.check_seconds,
        lines=run.lines,
    )


def run_searches(seeds: Sequence[int], processes: int, journal: Path | None = None) -> list[UnseenRun]:
    """Search on each seed's device, in order of the seeds.

    Each run is added to the `journal`, one JSON object a line. Those that it has are not run again.
    """
    found = {run.seed: run for run in _read(journal)}
    left = [seed for seed in seeds if seed not in found]
    with journal.open("a") if journal is not None else nullcontext() as file:
        for run in _run(left, processes):
            found[run.seed] = run
            if file is not None:
                file.write(json.dumps(asdict(run)) + "\n")
                file.flush()
    return [found[seed] for seed in seeds]


def _run(seeds: Sequence[int], processes: int) -> Iterator[UnseenRun]:
    if processes == 1:
        yield from map(run_search, seeds)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run_search, seeds, chunksize=CHUNK)


def _read(journal: Path | None) -> Iterator[UnseenRun]:
    """Yield the runs of a journal. A last line that was cut off is removed."""
    if journal is None or not journal.exists():
        return
    text = journal.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        journal.write_text(whole)
    for run in map(json.loads, whole.splitlines()):
        yield UnseenRun(**run | {"lines": tuple(Line(**line) for line in run["lines"])})
