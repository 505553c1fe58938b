"""How many mutants of the search, the surrogate, the cost model and the measuring do the tests kill?

pip install --target FOLDER mutmut libcst coverage    # no dependencies of the project
PYTHONPATH=FOLDER python -m benchmarks.mutation --seed 2 --work FOLDER --out benchmarks/results/mutation.json

1. The tests run once. Which lines each test reaches, and how long it takes, is kept below WORK/reached.
2. The seed draws the sample from all mutants, see `benchmarks.mutation.mutants`.
3. For each mutant, a process runs the tests that reach its statement: those of its module first, then the quickest,
   until `--test-seconds` are spent. A process that fails, dies or runs out of processor time kills the mutant.

Each outcome is a line of WORK/outcomes-COMMIT.jsonl: a run that was interrupted goes on there. At the end, every test
that killed a mutant must pass on the unchanged files.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import shutil
import subprocess
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import write_results
from benchmarks.mutation.mutants import Mutant, MutantFinder
from benchmarks.mutation.processes import ROOT, copy_tree, in_lanes, in_process
from benchmarks.mutation.summary import summarise
from benchmarks.mutation.tests import FOLDERS, Reached, Watch, find_reached, run_tests

THIRD_PARTY = (
    "numpy scipy.linalg scipy.optimize scipy.special scipy.stats optuna pydantic sqlalchemy alembic.command torch "
    "pytest coverage psutil"
)
PROCESSOR_SECONDS = 90
WALL_SECONDS = 300.0


def judge(tree: Path, mutant: Mutant, tests: Sequence[str]) -> dict[str, Any]:
    """Run the tests on the tree with this mutant in it."""
    path = tree / mutant.path
    original, stamp = path.read_text(), path.stat().st_mtime
    started = time.monotonic()

    def work() -> dict[str, Any]:
        watch = Watch()
        return {"status": run_tests(tree, tests, watch, "-x"), "test": watch.failed}

    path.write_text(mutant.source())
    os.utime(path, (stamp, stamp + 1 + zlib.crc32(mutant.key.encode()) % (1 << 24)))  # bytecode is cached by time
    try:
        said = in_process(tree, work, PROCESSOR_SECONDS, WALL_SECONDS) if tests else {"status": 0, "test": None}
    finally:
        path.write_text(original)
        os.utime(path, (stamp, stamp))
    if isinstance(said, str):
        said = {"status": said, "test": None}
    outcome = "survived" if said["status"] == 0 else "killed" if isinstance(said["status"], int) else said["status"]
    seconds = round(time.monotonic() - started, 2)
    return {"outcome": outcome, "by": said["test"], "num_tests": len(tests), "wall_seconds": seconds}


def read_outcomes(log: Path) -> dict[str, dict[str, Any]]:
    """What is known of each mutant, by its key."""
    if not log.exists():
        return {}
    return {row["key"]: row for row in map(json.loads, log.read_text().splitlines())}


def find_all(tree: Path) -> tuple[list[Mutant], Counter[str]]:
    """All mutants of the folders, and how many nodes each rule leaves out."""
    mutants: list[Mutant] = []
    excluded = Counter[str]()
    for file in sorted(file for folder in FOLDERS for file in (tree / folder).glob("*.py")):
        finder = MutantFinder(tree, str(file.relative_to(tree)))
        mutants += finder.find()
        excluded += finder.excluded
    return mutants, excluded


def run_sample(trees: Sequence[Path], sample: Sequence[Mutant], reached: Reached, log: Path, budget: float) -> None:
    """Judge what `log` does not have yet, and append it there."""
    known = read_outcomes(log)
    todo = [mutant for mutant in sample if mutant.key not in known]

    def work(lane: int, tree: Path) -> list[str]:
        for mutant in todo[lane :: len(trees)]:
            tests = reached.tests(mutant, budget)
            outcome = judge(tree, mutant, tests)
            with log.open("a") as lines:
                lines.write(json.dumps({"key": mutant.key, **outcome}) + "\n")
        return []

    in_lanes(trees, work)


def check_unchanged(tree: Path, outcomes: Iterable[Mapping[str, Any]]) -> None:
    """Every test that killed a mutant passes on the files as they are, else its failure says nothing of the mutant.

    Raises:
        RuntimeError: a test fails.
    """
    tests = sorted({outcome["by"] for outcome in outcomes if outcome["by"] is not None})
    watch = Watch()
    said = in_process(tree, lambda: [run_tests(tree, tests, watch), sorted(watch.bad)])
    if not isinstance(said, list) or said[0] != 0:
        raise RuntimeError(f"the unchanged files fail: {said}")


def main(arguments: list[str] | None = None) -> int:
    """Draw, run and record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sample", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--test-seconds", type=float, default=30.0)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
    for name in THIRD_PARTY.split():
        importlib.import_module(name)
    gc.freeze()  # a collection in a forked process would copy all that is shared
    trees = [copy_tree(commit) for _ in range(options.processes)]
    try:
        reached = find_reached(options.work / "reached", trees)
        every, excluded = find_all(trees[0])
        drawn = np.random.default_rng(options.seed).choice(len(every), options.sample, replace=False)
        sample = [every[index] for index in drawn]
        log = options.work / f"outcomes-{commit[:12]}.jsonl"
        run_sample(trees, sample, reached, log, options.test_seconds)
        outcomes = read_outcomes(log)
        check_unchanged(trees[0], [outcomes[mutant.key] for mutant in sample])
        settings = {
            "commit": commit,
            "sample": options.sample,
            "seed": options.seed,
            "test_seconds": options.test_seconds,
            "processor_seconds": PROCESSOR_SECONDS,
        }
        write_results(options.out, summarise(settings, every, excluded, sample, outcomes))
    finally:
        for tree in trees:
            shutil.rmtree(tree, ignore_errors=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
