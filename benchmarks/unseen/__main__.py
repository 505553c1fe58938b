"""Searches on devices and models that are drawn from seeds, and says how good they were and whether they knew it.

    python -m benchmarks.unseen --seed-range 5000 5400 --out results/unseen.json [--processes 2] [--journal FILE]
    python -m benchmarks.unseen --gate [reached]

Each seed is a device and a model of its own (`benchmarks.unseen.kernels`, `benchmarks.unseen.models`), with noise,
drift, outliers and errors of composition and memory (`benchmarks.unseen.truth`). The results name the commit, so that
seeds can be seen to be newer than the code. The gate searches on a fixed set and fails if a figure is worse than its
limit: what is wanted, or with `reached` what the search has reached.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import describe_commit, describe_environment, write_results
from benchmarks.replay.calibration import CONFIDENT, calibrate
from benchmarks.replay.runs import Line
from benchmarks.unseen.searches import UnseenRun, run_searches

LARGE_REGRET = 0.03


@dataclass(frozen=True, slots=True)
class Limits:
    """The worst that passes: largest regrets, least share true of lines >= 90, largest calibration error."""

    regret_p95: float
    confident_share_true: float
    expected_calibration_error: float


GATE = Limits(regret_p95=0.01, confident_share_true=0.9, expected_calibration_error=0.06)
REACHED = Limits(regret_p95=0.01, confident_share_true=0.92, expected_calibration_error=0.08)
"""What the search reaches on the first 80 devices of the gate: 0.5%, 97% and 0.07.

A perfectly calibrated search would have an error of 0.05 to 0.06 on so few devices: the lines of one share their truth.
"""


def summarize(runs: Sequence[UnseenRun]) -> dict[str, Any]:
    """Return regret, calibration with every decile, and the share of recommendations that do not run.

    A search without an answer has a regret of 1; `regret_of_answers` leaves it out. `first_confident` and
    `final_confident` are the first line of each search that is confident, and the answers that
    are: one observation a device.

    The bootstrap of the calibration's intervals draws devices, because the lines of one search are nearly one
    observation.
    """
    return {
        "num_runs": len(runs),
        "regret": _spread([run.regret for run in runs]),
        "regret_of_answers": _spread([run.regret for run in runs if not run.is_without_answer]),
        "num_without_answer": sum(run.is_without_answer for run in runs),
        "regret_of_admitted": _spread([run.regret_of_admitted for run in runs]),
        "share_within_tolerance": statistics.fmean(run.within_tolerance for run in runs),
        "mean_final_confidence": statistics.fmean(run.confidence + 0.5 for run in runs) / 100,
        "share_failing_whole": statistics.fmean(run.fails_whole for run in runs),
        "share_with_failed_checks": statistics.fmean(run.num_failed_checks > 0 for run in runs),
        "trials": statistics.median(run.num_trials for run in runs),
        "seconds": statistics.median(run.seconds for run in runs),
        "check_seconds": statistics.median(run.check_seconds for run in runs),
        "first_confident": _confident([line for run in runs if (line := run.first_confident) is not None]),
        "final_confident": _confident([Line(run.confidence, run.within_tolerance) for run in runs]),
        "calibration": calibrate({str(run.seed): run.lines for run in runs}),
    }


def _confident(lines: Sequence[Line]) -> dict[str, float | None]:
    """Return how many of `lines` are confident, what they said, and the share of them that came true."""
    sure = [line for line in lines if line.confidence >= CONFIDENT]
    return {
        "number": len(sure),
        "mean_forecast": statistics.fmean((line.confidence + 0.5) / 100 for line in sure) if sure else None,
        "share_true": statistics.fmean(line.within_tolerance for line in sure) if sure else None,
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": statistics.median(values),
        "p95": float(np.percentile(values, 95)),
        "max": max(values),
        "mean": statistics.fmean(values),
        "share_large": statistics.fmean(value > LARGE_REGRET for value in values),
    }


def misses(figures: Mapping[str, Any], limits: Limits) -> list[str]:
    """Return what is worse than its limit, in words."""
    calibration = figures["calibration"] or {}
    p95, error = figures["regret"]["p95"], calibration.get("expected_calibration_error", 0.0)
    true = calibration.get("confident_share_true")
    messages = []
    if p95 > limits.regret_p95:
        messages.append(f"the 95th percentile of regret is {p95:.2%}, above {limits.regret_p95:.2%}")
    if true is not None and true < limits.confident_share_true:
        messages.append(f"{true:.1%} of the lines >= 90 are true, below {limits.confident_share_true:.0%}")
    if error > limits.expected_calibration_error:
        messages.append(f"the calibration error is {error:.3f}, above {limits.expected_calibration_error:.3f}")
    return messages


def print_figures(figures: Mapping[str, Any]) -> None:
    regret, calibration = figures["regret"], figures["calibration"]
    parts = ", ".join(f"{name} {regret[name]:.2%}" for name in ("median", "p95", "max", "mean"))
    print(f"{figures['num_runs']} searches on unseen devices in {figures['wall_seconds']:.0f} s; regret {parts}")
    for name, sure in (("first lines", figures["first_confident"]), ("answers", figures["final_confident"])):
        if sure["number"]:
            print(f"{sure['number']} {name} >= 90 said {sure['mean_forecast']:.1%}, true {sure['share_true']:.1%}")
    if calibration is not None:
        sure, error = calibration["confident_share_true"], calibration["expected_calibration_error"]
        print(f"calibration error {error:.3f}; of all lines >= 90 {'-' if sure is None else f'{sure:.1%}'} are true")


GATES = {"wanted": ((1000, 1100), GATE), "reached": ((1000, 1080), REACHED)}


def main(arguments: list[str] | None = None) -> int:
    """Search on every seed, print the figures and write one JSON file; returns 1 if the gate fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unseen", description="Searches on unseen devices.")
    parser.add_argument("--seed-range", nargs=2, type=int, metavar=("FIRST", "END"), default=GATES["wanted"][0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--journal", type=Path, help="keeps each search of this code, so that a run can be continued")
    parser.add_argument("--gate", nargs="?", choices=GATES, const="wanted", help="use a fixed set, and its limits")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(arguments)
    first, end = GATES[options.gate][0] if options.gate else options.seed_range
    if not 0 <= first < end:
        parser.error("--seed-range needs a first seed of at least 0, and an end above it")
    # A linear algebra library in each process that takes all cores for small matrices makes all of them slow.
    os.environ |= {name: os.environ.get(name, "1") for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    started = time.perf_counter()
    runs = run_searches(range(first, end), options.processes, options.journal)
    results: dict[str, Any] = {
        "environment": describe_environment(),
        "commit": describe_commit(),
        "seed_range": [first, end],
        "wall_seconds": time.perf_counter() - started,
        **summarize(runs),
    }
    print_figures(results)
    if options.out is not None:
        write_results(options.out, results | {"runs": [_row(run) for run in runs]})
    if not options.gate:
        return 0
    failed = misses(results, GATES[options.gate][1])
    for message in failed:
        print(f"gate: {message}", file=sys.stderr)
    return 1 if failed else 0


def _row(run: UnseenRun) -> dict[str, Any]:
    """Return a run without its lines but the first that is confident."""
    first = run.first_confident
    return asdict(run) | {"lines": len(run.lines), "first_confident": None if first is None else asdict(first)}


if __name__ == "__main__":
    sys.exit(main())
