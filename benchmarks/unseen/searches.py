"""Runs the product's search on unseen devices, over processes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from benchmarks.replay.runs import Line, search
from benchmarks.unseen.world import draw_truth
from bexp.workers.replay.device import VirtualClock

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


def run_search(seed: int) -> UnseenRun:
    """Search on the device of one seed."""
    truth, clock = draw_truth(seed), VirtualClock()
    device = truth.device(seed, clock)
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


def run_searches(seeds: Sequence[int], processes: int) -> list[UnseenRun]:
    """Search on each seed's device, in order of the seeds."""
    if processes == 1:
        return [run_search(seed) for seed in seeds]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return list(pool.map(run_search, seeds, chunksize=CHUNK))
