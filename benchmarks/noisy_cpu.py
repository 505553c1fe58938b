"""Explorations on busy cores, against a sweep of the quiet machine.

    python -m benchmarks.record examples/cerebras-runconfig.yaml --whole all --whole-runs 5 --runs 1 --out QUIET.jsonl
    python -m benchmarks.noisy_cpu examples/cerebras-runconfig.yaml --quiet QUIET.jsonl --busy 2 --out FILE

The first command runs the whole model of every size on the quiet machine, in turns, because two runs of one size differ
by several percent. The second runs `bexp explore` again and again beside
`--busy` processes that only count, each time with a database of its own, as on a machine that has never explored
anything. The regret of each answer is that of its candidate on the quiet machine. Run both with nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.environment import describe_environment, write_results
from benchmarks.replay.ground_truth import GroundTruth
from bexp.child_process import module_command
from bexp.explorer.records.recommendation import Answer

COUNTING = "while True: pass"
WITHIN = 0.05
SECONDS = 120.0


@contextmanager
def busy_cores(number: int) -> Iterator[None]:
    """Keep so many processes busy within the context."""
    counting = [subprocess.Popen([sys.executable, "-c", COUNTING]) for _ in range(number)]
    try:
        yield
    finally:
        for process in counting:
            process.kill()
            process.wait()


def explore_once(config: Path, truth: GroundTruth) -> dict[str, Any]:
    """Explore on this machine's CPU with a new database; seconds are those of the whole command.

    Raises:
        RuntimeError: the command failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [*module_command("bexp.api.cli"), "explore", str(config.resolve()), "--device", "cpu", "--json"]
        environment = {**os.environ, "XDG_DATA_HOME": folder}
        started = time.perf_counter()
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - started
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)}: {ended.stderr}")
    return describe_run(seconds, Answer.model_validate(json.loads(ended.stdout)["answer"]), truth)


def describe_run(seconds: float, answer: Answer, truth: GroundTruth) -> dict[str, Any]:
    """Return the figures of one exploration, with the regret of its answer on the quiet machine."""
    found = answer.recommendation
    return {
        "seconds": seconds,
        "candidate": None if found is None else found.candidate.describe(),
        "regret": truth.regret(None if found is None else found.candidate),
        "performance": None if found is None else found.performance,
        "confidence": None if found is None else found.confidence,
        "confidences": {} if found is None else found.confidences,
        "run_noise": None if found is None else found.run_noise,
        "notes": [] if found is None else [note.text for note in found.notes],
        "timings": answer.timings,
    }


def summarize(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many runs were near the quiet machine's best, and in time."""
    regrets = sorted(run["regret"] for run in runs)
    return {
        "num_runs": len(runs),
        f"num_within_{WITHIN:.0%}": sum(regret <= WITHIN for regret in regrets),
        f"num_within_{SECONDS:.0f}_s": sum(run["seconds"] <= SECONDS for run in runs),
        "median_regret": regrets[len(regrets) // 2],
        "max_regret": regrets[-1],
        "max_seconds": max(run["seconds"] for run in runs),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--quiet", type=Path, required=True, help="the table of the quiet machine")
    parser.add_argument("--busy", type=int, default=2, help="processes that keep a core busy")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    truth, runs = GroundTruth.read(given.quiet), []
    for number in range(given.runs):
        with busy_cores(given.busy):
            runs.append(explore_once(given.config, truth))
        print(f"{number + 1} of {given.runs}: {json.dumps(runs[-1])}", flush=True)
        setting = {"config": given.config.name, "busy": given.busy, "quiet": truth.describe()}
        results = {"environment": describe_environment(), **setting, "summary": summarize(runs), "runs": runs}
        write_results(given.out, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
