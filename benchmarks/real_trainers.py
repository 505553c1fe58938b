"""Holds the recommendation for transformers' own classes against transformers' own Trainer.

    python -m benchmarks.real_trainers benchmarks/published/*.json --out results/h100-real-trainers.json --device cuda:0

For each configuration: an exploration with the target `transformers` through the service, a sweep by the Trainer of all
micro-batch sizes with and without gradient checkpointing, and the recommended configuration run by the Trainer after
`bexp.apply`. The file is written after each model; a second start goes on where the first ended.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import describe_environment, write_results

SEQ_LENGTH = 4096
SWEEP_SECONDS = 4.0
ANSWER = 0
"""Exit status of a client that found an answer."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every configuration that the file does not have yet."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_trainers", description=__doc__)
    parser.add_argument("configs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-seconds", type=float, default=120.0, help="of one exploration")
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {"environment": describe_environment(), "models": []}
    if options.out.exists():
        results["models"] = json.loads(options.out.read_text())["models"]
    known = {row["model"] for row in results["models"]}
    for path in options.configs:
        if path.stem in known:
            continue
        row = run_model(path, options)
        results["models"].append(row)
        write_results(options.out, results)
        print(describe(row), flush=True)
    return 0


def run_model(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One configuration: exploration, sweep, and the recommendation in the Trainer."""
    seq_length = min(SEQ_LENGTH, reach(json.loads(path.read_text())))
    with tempfile.TemporaryDirectory() as folder:
        exploration = explore(path, seq_length, options, Path(folder))
        sweep = trainer(path, seq_length, ["--sweep"], Path(folder) / "sweep.json")
        recommended: list[dict[str, Any]] = []
        if exploration["document"] is not None:
            found = exploration["document"]["recommendation"]["candidate"]
            run = {"micro_batch_size": found["micro_batch_size"], "recommendation": exploration["document"]}
            recommended = trainer(path, seq_length, ["--runs", json.dumps([run])], Path(folder) / "recommended.json")
    for one in recommended:
        one.pop("recommendation", None)  # it stands beside
    return {
        "model": path.stem,
        "seq_length": seq_length,
        "exploration": exploration,
        "sweep": sweep,
        "recommended": recommended,
    }


def reach(config: dict[str, Any]) -> int:
    """The longest sequence that a configuration has positions for."""
    return int(next((config[key] for key in ("max_position_embeddings", "n_positions") if key in config), SEQ_LENGTH))


def explore(path: Path, seq_length: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Explore through the service; the document of `bexp best --json`, null if there is no answer."""
    database = {"BEXP_DATABASE_URL": f"sqlite:///{folder}/bexp.db"}
    asked = ["--target", "transformers", "--seq-length", str(seq_length), "--batch-size", str(options.batch_size)]
    started = time.perf_counter()
    limits = ["--max-seconds", str(options.max_seconds), "--device", options.device]
    done = _client(["explore", str(path), *asked, *limits], database)
    seconds = time.perf_counter() - started
    identity = next((word for word in done.stdout.split() if len(word) == 16 and word.isalnum()), "")
    best = _client(["best", identity, "--json"], database) if done.returncode == ANSWER else None
    document = json.loads(best.stdout) if best is not None and best.returncode == ANSWER else None
    return {"wall_seconds": seconds, "log": done.stdout.splitlines(), "document": document}


def trainer(path: Path, seq_length: int, arguments: list[str], out: Path) -> list[dict[str, Any]]:
    """Runs of the Trainer, in processes of their own."""
    command = [sys.executable, "-m", "benchmarks.trainer_runs", str(path), "--seq-length", str(seq_length)]
    limits = ["--max-seconds", str(SWEEP_SECONDS), "--out", str(out)]
    subprocess.run([*command, *arguments, *limits], check=True, stdout=sys.stderr)
    runs: list[dict[str, Any]] = json.loads(out.read_text())["runs"]
    return runs


def best_of(runs: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The fastest run that did not fail; null if all did."""
    ran = [run for run in runs if "tokens_per_second" in run]
    return max(ran, key=lambda run: run["tokens_per_second"], default=None)


def ratio(row: dict[str, Any], runs: str = "recommended") -> float | None:
    """The best of these runs over the best of the sweep; null if one is missing or failed."""
    ours, stock = best_of(row.get(runs, [])), best_of(row["sweep"])
    if ours is None or stock is None:
        return None
    return float(ours["tokens_per_second"] / stock["tokens_per_second"])


def describe(row: dict[str, Any]) -> str:
    """One line for a person."""
    found = ratio(row)
    said = "no recommendation, or it failed" if found is None else f"{found:.3f}x the best of the sweep"
    return f"{row['model']}: {said}, answered after {row['exploration']['wall_seconds']:.0f} s"


def _client(arguments: Sequence[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "api.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


if __name__ == "__main__":
    raise SystemExit(main())
