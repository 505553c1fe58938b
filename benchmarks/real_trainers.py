"""Holds the recommendation for transformers' own classes against transformers' own Trainer.

    python -m benchmarks.real_trainers benchmarks/published/*.json --out results/h100-real-trainers.json --gpus 0,1
    python -m benchmarks.real_trainers benchmarks/published/gpt2-medium.json --set padding=right --out ...
    python -m benchmarks.real_trainers benchmarks/published/olmoe*.json --set losses=[library,chunked] --out ...

For each configuration: an exploration with the target `transformers` through the service, a sweep by the Trainer of
all micro-batch sizes with and without gradient checkpointing, and the recommended configuration, and the best stock
one that the answer names, run by the Trainer after `bexp.apply`. The Trainer accumulates to the batch that the
exploration was asked about. `--set` sets fields of the request; an exploration of compiled layers is also held against
the Trainer's own `torch_compile`, at the sweep's best size and the next two.

Each GPU has a model at a time. The file is written after each part of a row; a second start goes on where the first
ended.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.environment import describe_environment, write_results
from benchmarks.trainer_runs import SIZES

SEQ_LENGTH = 4096
SWEEP_SECONDS = 4.0
ANSWER = 0
"""Exit status of a client that found an answer."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every configuration that the file does not have yet with these fields."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_trainers", description=__doc__)
    parser.add_argument("configs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", default="0", help="indices of the GPUs, by comma; empty for the CPU")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", dest="fields")
    parser.add_argument("--max-seconds", type=float, default=120.0, help="of one exploration")
    parser.add_argument("--start-until", type=float, default=float("inf"), help="start no model after these seconds")
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {"environment": {}, "models": []}
    if options.out.exists():
        results = json.loads(options.out.read_text())
    results["environment"] = describe_environment()
    table = Table(results, options)
    started = time.perf_counter()
    with ThreadPoolExecutor(table.gpus.qsize()) as pool:
        for path in options.configs:
            pool.submit(table.add, path, started + options.start_until).add_done_callback(_print_error)
    return 0


class Table:
    """The rows of one file, filled by as many threads as there are GPUs."""

    def __init__(self, results: dict[str, Any], options: argparse.Namespace) -> None:
        self.results = results
        self.options = options
        self.gpus: queue.Queue[str] = queue.Queue()
        for gpu in options.gpus.split(","):
            self.gpus.put(gpu)
        self._lock = threading.Lock()

    def add(self, path: Path, latest_start: float) -> None:
        """Measure what the row of one configuration lacks, unless it is too late to start."""
        with self._lock:
            row = self._row(path)
        with self._gpu() as environment:
            if time.perf_counter() > latest_start:
                return
            run = ModelRun(path, row, environment, self.options)
            for part, measure in run.parts().items():
                if not run.has(part):
                    measured = measure()
                    with self._lock:
                        row[part] = measured
                        write_results(self.options.out, self.results)
        print(describe(row), flush=True)

    def _row(self, path: Path) -> dict[str, Any]:
        """The row of a configuration with the fields that were asked for, a new one if there is none."""
        rows: list[dict[str, Any]] = self.results["models"]
        fields = sorted(self.options.fields)
        padded = "padding=right" in fields or "padding=left" in fields
        alike = [row for row in rows if row["model"] == path.stem]
        row = next((row for row in alike if row["fields"] == fields), None)
        if row is None:
            seq_length = min(SEQ_LENGTH, reach(json.loads(path.read_text())))
            row = {"model": path.stem, "fields": fields, "padded": padded, "seq_length": seq_length}
            rows.append(row)
        for other in alike:
            if other["padded"] is padded and accumulates(other.get("sweep"), self.options.batch_size):
                row["sweep"] = other["sweep"]
        return row

    @contextmanager
    def _gpu(self) -> Iterator[dict[str, str]]:
        """The environment of programs that see one GPU, or none."""
        gpu = self.gpus.get()
        try:
            yield {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
        finally:
            self.gpus.put(gpu)


class ModelRun:
    """The parts of one row: exploration, sweeps, and the answer in the Trainer."""

    def __init__(
        self, path: Path, row: dict[str, Any], environment: Mapping[str, str], options: argparse.Namespace
    ) -> None:
        self._path = path
        self._row = row
        self._environment = environment
        self._options = options
        self._seq_length: int = row["seq_length"]
        self._device = "cuda:0" if environment["CUDA_VISIBLE_DEVICES"] else "cpu"

    def parts(self) -> dict[str, Callable[[], Any]]:
        """What measures each part, in the order in which one may need another."""
        parts: dict[str, Callable[[], Any]] = {
            "exploration": self._explore,
            "recommended": lambda: self._train_as("candidate"),
            "stock": lambda: self._train_as("stock"),
            "sweep": lambda: self._train(["--sweep"]),
        }
        if any(field in self._row["fields"] for field in ("execution=compile", "execution=explore")):
            parts["compiled_sweep"] = lambda: self._train(["--runs", json.dumps(compiled_runs(self._row["sweep"]))])
        return parts

    def has(self, part: str) -> bool:
        """Whether the row has a part. Runs of the Trainer at another batch than the exploration's are made again."""
        if part == "exploration":
            return part in self._row
        return part in self._row and accumulates(self._row[part], self._options.batch_size)

    def _explore(self) -> dict[str, Any]:
        """Explore through the service; the document of `bexp best --json`, None if there is no answer."""
        asked = ["--fresh", "--target", "transformers", "--seq-length", str(self._seq_length)]
        asked += ["--batch-size", str(self._options.batch_size), "--max-seconds", str(self._options.max_seconds)]
        asked += [word for field in self._row["fields"] for word in ("--set", field)]
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            done = self._client(["explore", str(self._path.absolute()), *asked, "--device", self._device], folder)
            seconds = time.perf_counter() - started
            best = self._client(["best", "latest", "--json"], folder) if done.returncode == ANSWER else None
        document = json.loads(best.stdout) if best is not None and best.returncode == ANSWER else None
        log, errors = (
            [line for line in text.splitlines() if folder not in line] for text in (done.stdout, done.stderr)
        )
        return {"wall_seconds": seconds, "log": log, "errors": errors[-20:], "document": document}

    def _train_as(self, place: str) -> list[dict[str, Any]]:
        """The Trainer with one candidate of the answer."""
        document = self._row["exploration"]["document"]
        recommendation = {} if document is None else document["recommendation"]
        candidate = (
            recommendation.get("candidate")
            if place == "candidate"
            else (recommendation.get(place) or {}).get("candidate")
        )
        if candidate is None or (place != "candidate" and candidate == recommendation["candidate"]):
            return []
        wanted = {**document, "recommendation": {**recommendation, "candidate": candidate, "dividing": None}}
        run = {"micro_batch_size": candidate["micro_batch_size"], "recommendation": wanted}
        runs = self._train(["--runs", json.dumps([run])])
        return [{key: value for key, value in one.items() if key != "recommendation"} for one in runs]

    def _train(self, arguments: list[str]) -> list[dict[str, Any]]:
        """Runs of the Trainer, each in a process of its own."""
        command = [sys.executable, "-m", "benchmarks.trainer_runs", str(self._path.absolute())]
        padding = ["--padding"] if self._row["padded"] else []
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "runs.json"
            limits = ["--seq-length", str(self._seq_length), "--max-seconds", str(SWEEP_SECONDS), "--out", str(out)]
            limits += ["--batch-size", str(self._options.batch_size)]
            subprocess.run(
                [*command, *limits, *padding, *arguments], check=True, stdout=sys.stderr, env=dict(self._environment)
            )
            runs: list[dict[str, Any]] = json.loads(out.read_text())["runs"]
        return runs

    def _client(self, arguments: Sequence[str], folder: str) -> subprocess.CompletedProcess[str]:
        """`bexp` with a database and a log folder of its own."""
        command = [sys.executable, "-m", "bexp.api.cli", *arguments]
        paths = os.pathsep.join(filter(None, [str(Path.cwd()), self._environment.get("PYTHONPATH")]))
        environment = {**self._environment, "BEXP_DATABASE_URL": f"sqlite:///{folder}/bexp.db", "PYTHONPATH": paths}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=folder)


def accumulates(runs: Sequence[dict[str, Any]] | None, batch_size: int) -> bool:
    """Whether all these runs of the Trainer accumulate micro-batches to steps of this batch."""
    return runs is not None and all(run.get("batch_size") == batch_size for run in runs)


def reach(config: dict[str, Any]) -> int:
    """The longest sequence that a configuration has positions for."""
    return int(next((config[key] for key in ("max_position_embeddings", "n_positions") if key in config), SEQ_LENGTH))


def compiled_runs(sweep: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The Trainer's own compilation at the best size without checkpointing and the next two, which may fit then."""
    plain = best_of([run for run in sweep if not run["gradient_checkpointing"]])
    best = 1 if plain is None else plain["micro_batch_size"]
    return [{"micro_batch_size": size, "torch_compile": True} for size in SIZES if size >= best][:3]


def best_of(runs: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The fastest run that did not fail; None if all did."""
    ran = [run for run in runs if "tokens_per_second" in run]
    return max(ran, key=lambda run: run["tokens_per_second"], default=None)


def ratio(row: dict[str, Any]) -> float | None:
    """The best of the recommended runs over the best of the sweep; None if one is missing or failed."""
    ours, stock = best_of(row.get("recommended", [])), best_of(row.get("sweep", []))
    if ours is None or stock is None:
        return None
    return float(ours["tokens_per_second"] / stock["tokens_per_second"])


def describe(row: dict[str, Any]) -> str:
    """One line for a person."""
    gain = ratio(row)
    said = "no recommendation, or it failed" if gain is None else f"{gain:.3f}x the best of the sweep"
    named = " ".join([row["model"], *row["fields"]])
    return f"{named}: {said}, answered after {row['exploration']['wall_seconds']:.0f} s"


def _print_error(done: Any) -> None:
    error = done.exception()
    if error is not None:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
