"""Replays searches on recorded tables and compares them.

    python -m benchmarks.replay tables/*.jsonl --out results/replay.json [--seeds 100] [--processes 2]

Every strategy sees the recorded runs of a component, drawn with the run's seed, and is charged the recorded seconds.
With `--truth drawn` it sees runs that scatter around their mean as separate jobs do, and whole models with a
composition error (`benchmarks.replay.drawn_truth`). A strategy is charged once for components that several of its
candidates share. Optuna's samplers run through the product's search, so they stop by the same confidence. What is slow
runs on fewer seeds (`MOST_SEEDS`).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.environment import describe_commit, describe_environment, write_results
from benchmarks.replay.runs import MOST_SEEDS, SAMPLERS, STRATEGIES, read_truth, run_all
from benchmarks.replay.summary import summarize
from bexp.workers.replay.recording import RecordingError

TRUTHS = ("recorded", "drawn")


def main(arguments: list[str] | None = None) -> int:
    """Run everything, print the comparison and write one JSON file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description="Replay searches on tables.")
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--strategies", nargs="+", choices=(*SAMPLERS, *STRATEGIES), default=[*SAMPLERS, *STRATEGIES])
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--truth",
        choices=TRUTHS,
        default="recorded",
        help="recorded: a run is a recorded one; drawn: it scatters around the recorded mean as separate jobs do",
    )
    parser.add_argument("--full", action="store_true", help="write every run with its path and lines too")
    options = parser.parse_args(arguments)
    started, commit = time.perf_counter(), describe_commit()
    try:
        truths = {path: read_truth(path) for path in options.tables}
    except (RecordingError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    tables = {
        truth.name: {"path": str(path), "tolerance": truth.request.tolerance, **truth.describe()}
        for path, truth in truths.items()
    }
    if len(tables) < len(truths):
        print("two tables have the same name", file=sys.stderr)
        return 2
    # A linear algebra library in each process that takes all cores for small matrices makes all of them slow.
    os.environ |= {name: os.environ.get(name, "1") for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    seeds = {name: min(options.seeds, MOST_SEEDS.get(name, options.seeds)) for name in options.strategies}
    drawn = options.truth == "drawn"
    runs = list(run_all(options.tables, options.strategies, seeds, options.processes, drawn=drawn))
    results: dict[str, Any] = {
        "environment": describe_environment(),
        "commit": commit,
        "seeds": seeds,
        "truth": options.truth,
        "tables": tables,
        "wall_seconds": time.perf_counter() - started,
        "summary": summarize(runs, tables),
    }
    if options.full:
        results["runs"] = [asdict(run) for run in runs]
    write_results(options.out, results)
    print_summary(results)
    return 0


def print_summary(results: Mapping[str, Any]) -> None:
    """Tables, strategies, calibration and goals, on stdout."""
    summary = results["summary"]
    for name, table in results["tables"].items():
        print(
            f"{name}: {table['num_candidates']} candidates ({table['num_feasible']} feasible, "
            f"{table['num_within_tolerance']} within tolerance), {table['num_components']} components, "
            f"{table['num_whole_models']} whole models, exhaustive {table['exhaustive_seconds']:.0f} s"
        )
        for strategy, figures in summary["tables"].get(name, {}).items():
            print("  " + _row(strategy, figures))
    print("all tables")
    for strategy, figures in summary["strategies"].items():
        print("  " + _row(strategy, figures))
    for what, calibration in (
        ("calibration", summary["calibration"]),
        ("of tables timed whole", summary["calibration_of_whole_models"]),
    ):
        if calibration is None:
            continue
        print(
            f"{what}: error {calibration['expected_calibration_error']:.3f}, Brier {calibration['brier']:.3f} "
            f"(constant {calibration['brier_constant']:.3f}), of {calibration['num_confident_lines']:.0f} lines with "
            f"confidence >= 90 {_percent(calibration['confident_share_true'])} within tolerance; "
            f"95% intervals over tables: {calibration['intervals_95']}"
        )
        for row in calibration["reliability"]:
            print(
                f"  {row['from']:>3.0f}-{row['to']:<3.0f} {row['num_lines']:>7.0f} lines, "
                f"said {_percent(row['mean_forecast'])}, true {_percent(row['share_true'])}"
            )
    for goal, outcome in (summary["goals"] or {}).items():
        print(f"{'met   ' if outcome['met'] else 'MISSED'} {goal}: {outcome['found']}")
    print(f"{results['wall_seconds']:.0f} s")


def _row(strategy: str, figures: Mapping[str, Any]) -> str:
    regret, share = figures["regret"], figures["share_of_exhaustive"]
    at_ours, confident = figures["regret_at_our_seconds"], figures["seconds_to_confidence_90_median"]
    return (
        f"{strategy:<21} regret {_percent(regret['median'])} p95 {_percent(regret['p95'])} max "
        f"{_percent(regret['max'])}; trials {figures['trials']['median']:>4.0f}; "
        f"{figures['seconds']['median']:>7.1f} s ({_percent(share['median'])} of exhaustive); "
        f"OOM {figures['out_of_memory']['median']:.0f}"
        + (f"; confident after {confident:.1f} s" if confident is not None else "")
        + (f"; at our seconds {_percent(at_ours['median'])} p95 {_percent(at_ours['p95'])}" if at_ours else "")
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


if __name__ == "__main__":
    sys.exit(main())
