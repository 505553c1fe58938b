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
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.environment import describe_commit, describe_environment, write_results
from benchmarks.unseen.figures import GATE, REACHED, misses, print_figures, summarize
from benchmarks.unseen.searches import UnseenRun, run_searches

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
