"""Replays searches on recorded tables and compares them.

    python -m benchmarks.replay tables/*.jsonl --out results/replay.json [--seeds 100] [--processes 2]

Every strategy sees the recorded runs of a component, drawn with the run's seed, and is charged the recorded seconds.
With `--truth drawn` it sees runs that scatter around their mean as separate jobs do, and whole models with a
composition error (`benchmarks.replay.drawn_truth`). A strategy is charged once for components that several of its
candidates share. Optuna's samplers run through the product's search, so they stop by the same confidence.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.environment import describe_commit, describe_environment, write_results
from benchmarks.replay.runs import SAMPLERS, STRATEGIES, read_truth, run_all
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
    drawn = options.truth == "drawn"
    runs = list(run_all(options.tables, options.strategies, options.seeds, options.processes, drawn=drawn))
    results: dict[str, Any] = {
        "environment": describe_environment(),
        "commit": commit,
        "seeds": options.seeds,
        "truth": options.truth,
        "tables": tables,
        "wall_seconds": time.perf_counter() - started,
        "summary": summarize(runs, tables),
    }
    write_results(options.out, results)
    for name, figures in results["summary"]["strategies"].items():
        print(f"{name:<24} mean regret {figures['regret_mean']:.2%}, {figures['seconds']['median']:.1f} s")
    print(f"calibration: {results['summary']['calibration']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
