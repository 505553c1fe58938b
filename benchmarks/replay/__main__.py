"""Replays searches on recorded tables and compares them.

    python -m benchmarks.replay tables/*.jsonl --out results/replay.json [--seeds 100] [--processes 2]

Every strategy sees the recorded runs of a component, drawn with the run's seed, and is charged the recorded seconds.
With `--truth drawn` it sees runs that scatter around their mean as separate jobs do, and whole models with a
composition error (`benchmarks.replay.ground_truth`). A strategy is charged once for components that several of its
candidates share. Optuna's samplers run through the product's search, so they stop by the same confidence.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import describe_commit, describe_environment, write_results
from benchmarks.replay.calibration import calibrate
from benchmarks.replay.runs import OURS, SAMPLERS, STRATEGIES, Run, read_truth, run_all
from bexp.workers.replay.recording import RecordingError


def summarize(runs: Sequence[Run], tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Figures by strategy over all tables, by table and strategy, and the calibration.

    The truth of a table that was timed whole is what a confidence is about; such tables are calibrated apart, too.
    """
    by_table = {
        table: {name: _figures(some, tables) for name, some in _group(group, lambda run: run.strategy).items()}
        for table, group in _group(runs, lambda run: run.table).items()
    }
    ours = [run for run in runs if run.strategy == OURS]
    lines = {
        table: [line for run in of_table for line in run.lines]
        for table, of_table in _group(ours, lambda run: run.table).items()
    }
    whole = {t for t, table in tables.items() if table.get("num_whole_models", 0) >= table.get("num_feasible", 1)}
    timed = {table: of_table for table, of_table in lines.items() if table in whole}
    return {
        "strategies": {name: _figures(group, tables) for name, group in _group(runs, lambda run: run.strategy).items()},
        "tables": by_table,
        "calibration": calibrate(lines),
        "calibration_of_whole_models": calibrate(timed) if len(timed) < len(lines) else None,
        "cheaper_with_equal_or_better_regret": cheaper(by_table),
    }


def _figures(runs: Sequence[Run], tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    regrets = [run.regret for run in runs]
    return {
        "num_runs": len(runs),
        "regret": _spread(regrets),
        "regret_mean": statistics.fmean(regrets),
        "num_without_answer": sum(regret >= 1.0 for regret in regrets),
        "trials": _spread([float(run.num_trials) for run in runs]),
        "seconds": _spread([run.seconds for run in runs]),
        "check_seconds": _spread([run.check_seconds for run in runs]),
        "share_of_exhaustive": _spread([run.seconds / tables[run.table]["exhaustive_seconds"] for run in runs]),
        "out_of_memory": _spread([float(run.num_out_of_memory) for run in runs]),
        "share_within_tolerance": statistics.fmean(run.regret <= tables[run.table]["tolerance"] for run in runs),
    }


def cheaper(by_table: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """`table: strategy` for each that took fewer seconds than ours and has no larger regret, in mean and p95."""
    return [
        f"{table}: {name}"
        for table, strategies in by_table.items()
        for name, other in strategies.items()
        if (ours := strategies.get(OURS)) is not None
        and name != OURS
        and other["regret_mean"] <= ours["regret_mean"]
        and other["regret"]["p95"] <= ours["regret"]["p95"]
        and other["seconds"]["median"] < ours["seconds"]["median"]
    ]


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "p95": float(np.percentile(values, 95)), "max": max(values)}


def _group(runs: Iterable[Run], key: Callable[[Run], str]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


TRUTHS = ("recorded", "drawn")


def main(arguments: list[str] | None = None) -> int:
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
