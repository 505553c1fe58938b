"""What it costs to choose among executions: searches on the same unseen devices in eager code, and with a choice.

    python -m benchmarks.unseen.executions --seed-range FIRST END --out F

Each device is searched with `execution: eager` and with a choice, in three spaces: the drawn one, one of the three
smallest micro-batch sizes with a single value of everything else, and that of a model of a library
(`benchmarks.unseen.library`), whose choice is the default of a GPU: its losses and kernels, too. The choice is with
CUDA graphs, or with all executions. Graphs have the components of eager code, so that they cost whole models alone.
Compiled code has components of its own, and each takes 4 to 20 s to compile. The cost is the device seconds of all
searches together, compilation and whole models included, as a multiple of those without the choice.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import describe_commit, describe_environment, write_results
from benchmarks.replay.calibration import CONFIDENT
from benchmarks.replay.runs import Run, search
from benchmarks.unseen.device import UnseenDevice
from benchmarks.unseen.library import draw_library_truth
from benchmarks.unseen.truth import UnseenTruth, draw_truth
from bexp.explorer.dimensions.execution import Execution
from bexp.workers.replay.profiler import VirtualClock

SIZES = {"drawn": None, "three sizes": 3}
"""Drawn spaces by name, with the number of their micro-batch sizes; None leaves the space as it was drawn."""
LIBRARY = "library"
CHOICES: dict[str, tuple[Execution, ...]] = {"graphs": (Execution.EAGER, Execution.GRAPH), "all": tuple(Execution)}
RUNS = [*((space, choice) for choice in CHOICES for space in SIZES), (LIBRARY, "all")]
MOST_TIMES = 1.3
"""What a choice with graphs may cost."""


@dataclass(frozen=True, slots=True)
class ExecutionRun:
    """A device's two searches in one space: seconds with whole models, and regrets, each without and with a choice.

    `gain` is how much faster the best of the choice is than the best in eager code. `first_confident` says whether the
    first confident line of the search with a choice was true; None if there was none.
    """

    seed: int
    space: str
    choice: str
    seconds: tuple[float, float]
    check_seconds: tuple[float, float]
    regret: tuple[float, float]
    gain: float = 1.0
    first_confident: bool | None = None


def compare(seed: int, space: str, choice: str) -> ExecutionRun:
    """Search on the device of a seed without and with a choice of executions."""
    (eager, without), (all_of, chosen) = _search(seed, space, None), _search(seed, space, choice)
    return ExecutionRun(
        seed,
        space,
        choice,
        (without.seconds + without.check_seconds, chosen.seconds + chosen.check_seconds),
        (without.check_seconds, chosen.check_seconds),
        (without.regret, chosen.regret),
        all_of.best / eager.best,
        next((line.within_tolerance for line in chosen.lines if line.confidence >= CONFIDENT), None),
    )


def _search(seed: int, space: str, choice: str | None) -> tuple[UnseenTruth, Run]:
    if space == LIBRARY:
        truth = draw_library_truth(seed, quick=choice is None)
    else:
        truth = draw_truth(seed, executions=None if choice is None else CHOICES[choice], num_sizes=SIZES[space])
    clock = VirtualClock()
    return truth, search(truth, seed, UnseenDevice(truth, seed, clock), clock)


def summarize(runs: Sequence[ExecutionRun]) -> dict[str, Any]:
    """Return for each choice in each space how many times the seconds are, what is gained, and both regrets."""
    by_space = {}
    for choice, space in dict.fromkeys((run.choice, run.space) for run in runs):
        of = [run for run in runs if (run.choice, run.space) == (choice, space)]
        without, together = (sum(run.seconds[i] for run in of) for i in range(2))
        times = [run.seconds[1] / run.seconds[0] for run in of]
        sure = [run.first_confident for run in of if run.first_confident is not None]
        by_space[f"{choice}, {space}"] = {
            "num_devices": len(of),
            "times": together / without,
            "seconds": [_spread([run.seconds[i] for run in of]) for i in range(2)],
            "gain": _spread([run.gain for run in of]),
            "first_confident_true": sum(sure) / len(sure) if sure else None,
            "times_by_device": {
                "median": statistics.median(times),
                "p90": float(np.percentile(times, 90)),
                "max": max(times),
            },
            "check_times": sum(run.check_seconds[1] for run in of) / sum(run.check_seconds[0] for run in of),
            "regret": [_spread([run.regret[i] for run in of]) for i in range(2)],
        }
    return by_space


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": statistics.fmean(values),
        "p95": float(np.percentile(values, 95)),
        "max": max(values),
    }


def main(arguments: list[str] | None = None) -> int:
    """Compare on every seed, print the figures and write one JSON file; returns 1 if a space costs too much."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unseen.executions", description=__doc__)
    parser.add_argument("--seed-range", nargs=2, type=int, metavar=("FIRST", "END"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(arguments)
    first, end = options.seed_range
    if not 0 <= first < end:
        parser.error("--seed-range needs a first seed of at least 0, and an end above it")
    os.environ |= {name: os.environ.get(name, "1") for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    tasks = [(seed, space, choice) for space, choice in RUNS for seed in range(first, end)]
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        runs = list(pool.map(compare, *zip(*tasks, strict=True), chunksize=5))
    spaces = summarize(runs)
    results = {"environment": describe_environment(), "commit": describe_commit(), "seed_range": [first, end]}
    write_results(options.out, results | {"spaces": spaces, "runs": [asdict(run) for run in runs]})
    for name, space in spaces.items():
        regrets = " and ".join(f"{each['mean']:.2%} (p95 {each['p95']:.2%})" for each in space["regret"])
        print(f"{name}: {space['times']:.2f}x the device seconds on {space['num_devices']} devices; regret {regrets}")
    return int(any(space["times"] > MOST_TIMES for name, space in spaces.items() if name.startswith("graphs")))


if __name__ == "__main__":
    sys.exit(main())
