"""Compares a search that starts from the components of an earlier job with one that starts from nothing.

Both see the same device and seed. The earlier job ran on the same device with other noise, some time ago, when all of
it was a little faster or slower. `same` reuses all its components; `like` reuses those of its layers, as for a model
with another vocabulary and another number of layers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.replay.calibration import CONFIDENT, calibrate
from benchmarks.replay.drawn_truth import DrawnTruth
from benchmarks.replay.ground_truth import GroundTruth
from benchmarks.replay.runs import Run, read_truth, search
from bexp.explorer.cost_model.components import Component, ComponentKind
from bexp.explorer.records.earlier_runs import EarlierRun, EarlierRuns
from bexp.explorer.records.measurement import ComponentMeasurement, Measurement
from bexp.explorer.records.trial import TrialPlan
from bexp.workers.replay.device import VirtualClock

AGE_SECONDS = 86_400.0
SHIFT_STD = 0.005
"""Relative standard deviation of what all components of the earlier job have in common."""
EARLIER_SEED = 1_000_003
"""Added to a seed for the noise of the earlier job."""
LAYERS = frozenset(
    {ComponentKind.ATTENTION, ComponentKind.DENSE_FFN, ComponentKind.MOE_FFN, ComponentKind.LAYER},
)
REUSED: Mapping[str, Callable[[Component], bool]] = {
    "alone": lambda component: False,
    "like": lambda component: component.kind in LAYERS,
    "same": lambda component: not component.is_joint,
}
"""Which components of the earlier job each kind of search reuses."""


def compare_second_job(paths: Sequence[Path], seeds: int, processes: int) -> dict[str, Any]:
    """Return the figures of each kind of search over all tables. Each seed has a truth of its own."""
    runs = list(_runs(paths, seeds, processes))
    names = list(dict.fromkeys(run["alone"].table for run in runs))
    return {
        "num_seeds": seeds,
        "age_seconds": AGE_SECONDS,
        "shift_std": SHIFT_STD,
        "all_tables": {kind: _figures([run[kind] for run in runs]) for kind in REUSED},
        "by_table": {
            name: {kind: _figures([run[kind] for run in runs if run[kind].table == name]) for kind in REUSED}
            for name in names
        },
    }


def print_second_job(found: Mapping[str, Any]) -> None:
    """Print a line for each kind of search over all tables."""
    for kind, figures in found["all_tables"].items():
        calibration = figures["calibration"]
        print(
            f"{kind:<6} to confidence {CONFIDENT}: median {figures['seconds_to_confident']['median']:.2f} s, "
            f"{figures['trials_to_confident']['median']:.0f} trials ({figures['share_confident']:.0%} of runs); whole "
            f"search {figures['seconds']['median']:.2f} s; regret mean {figures['regret']['mean']:.3%}, "
            f"p95 {figures['regret']['p95']:.2%}, max {figures['regret']['max']:.2%}; "
            f"ECE {calibration['expected_calibration_error']:.3f}, lines >= {CONFIDENT} true "
            f"{calibration['confident_share_true'] or 0.0:.1%}"
        )


def compare_searches(truth: GroundTruth, seed: int) -> dict[str, Run]:
    """Return one run of each kind of search."""
    earlier = _Remembering(truth, seed + EARLIER_SEED)
    search(truth, seed + EARLIER_SEED, earlier, earlier.clock)
    shift = math.exp(SHIFT_STD * float(np.random.default_rng([seed, 4]).standard_normal()))
    found = {}
    for kind, is_reused in REUSED.items():
        runs = tuple(_earlier_run(one, shift) for one in earlier.measured if is_reused(one.component))
        report = truth.report.model_copy(update={"earlier": EarlierRuns(runs=runs, num_explorations=1)})
        clock = VirtualClock()
        found[kind] = search(replace(truth, report=report), seed, truth.device(seed, clock), clock)
    return found


class _Remembering:
    """A device that keeps what it measured."""

    def __init__(self, truth: GroundTruth, seed: int) -> None:
        self.clock = VirtualClock()
        self.measured: list[ComponentMeasurement] = []
        self._device = truth.device(seed, self.clock)

    def __call__(self, plan: TrialPlan) -> Measurement:
        measurement = self._device(plan)
        self.measured += measurement.components
        return measurement


def _earlier_run(found: ComponentMeasurement, shift: float) -> EarlierRun:
    moved = {
        name: shift * getattr(found, name) for name in ("device_seconds", "forward_device_seconds", "host_seconds")
    }
    return EarlierRun(measurement=found.model_copy(update=moved), age_seconds=AGE_SECONDS)


def _figures(runs: Sequence[Run]) -> dict[str, Any]:
    confident = [_to_confident(run) for run in runs]
    by_table: dict[str, list[Any]] = {}
    for run in runs:
        by_table.setdefault(run.table, []).extend(run.lines)
    return {
        "num_runs": len(runs),
        "share_confident": statistics.fmean(run.confidence is not None and run.confidence >= CONFIDENT for run in runs),
        "seconds_to_confident": _spread([seconds for seconds, _ in confident]),
        "trials_to_confident": _spread([float(trials) for _, trials in confident]),
        "seconds": _spread([run.seconds for run in runs]),
        "trials": _spread([float(run.num_trials) for run in runs]),
        "regret": _spread([run.regret for run in runs]),
        "calibration": calibrate(by_table),
    }


def _to_confident(run: Run) -> tuple[float, int]:
    """Return device seconds and trials until the first line that is confident; of the whole search if none is."""
    seconds = next((line.at_seconds for line in run.lines if line.confidence >= CONFIDENT), run.seconds)
    return seconds, sum(at <= seconds for at, _ in run.path)


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": statistics.median(values),
        "mean": statistics.fmean(values),
        "p95": float(np.percentile(values, 95)),
        "max": max(values),
    }


def _runs(paths: Sequence[Path], seeds: int, processes: int) -> Iterator[dict[str, Run]]:
    tasks = [(path, tuple(range(first, min(first + 10, seeds)))) for path in paths for first in range(0, seeds, 10)]
    if processes == 1:
        for task in tasks:
            yield from _run_task(*task)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for found in pool.map(_run_task, *zip(*tasks, strict=True)):
            yield from found


def _run_task(path: Path, seeds: tuple[int, ...]) -> list[dict[str, Run]]:
    recorded = read_truth(path)
    return [compare_searches(DrawnTruth.draw(recorded, seed), seed) for seed in seeds]
