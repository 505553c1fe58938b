"""Holds the recommendation for transformers' own classes against transformers' own Trainer.

    python -m benchmarks.real_trainers benchmarks/published/*.json --out results/h100-real-trainers.json --gpus 0,1
    python -m benchmarks.real_trainers benchmarks/published/gpt2-medium.json --set 'lengths=lognormal(300, 1)' --out ...
    python -m benchmarks.real_trainers benchmarks/published/olmoe*.json --set losses=[library,chunked] --out ...

For each configuration there is an exploration with the target `transformers` through the service. Then each contender
gets its best size, among those that divide the batch that the exploration was asked about:

- `unchanged`: the Trainer alone, with gradient checkpointing where that is faster.
- `compiled`: its own `torch_compile`, unless the exploration was asked for eager code or for padded batches.
- `liger`: its `use_liger_kernel`; with `torch_compile`, too, where `compiled` runs. The faster one remains.
- `recommended`: what the README does with the answer, at the answer's size.
- `stock`: the recommended candidate without kernels or tiles of this project, if it has any.
- `library_loss`: `stock` with the library's loss, if the recommended one is another.
- `experts`: the recommended candidate with the fastest implementation of the experts that is not this project's, of
  those that run here. The loss and the execution stay. `--without unchanged compiled liger stock library_loss` leaves
  the others out.

Sizes are chosen by one short run each, see `next_size`. Then the contenders run in turns, `--rounds` times one after
the other, each run in a new process. Where texts differ in length, `longest` is the recommended run on nothing but the
longest text of an epoch. The spread of a contender is thus that of new processes on one machine within
minutes. It says nothing of other machines and days.

Adapters, quantised weights, the optimizer and packed texts that the exploration was asked for are those of all
contenders, see `trainer_recipes`: `unchanged` is then the best that a sweep of sizes, with and without checkpointing,
finds for that recipe.

Each GPU has a model at a time. The file is written after each part of a row: the exploration, the sizes of a contender,
a round. A second start with the same fields and batch measures what a row lacks.
"""

from __future__ import annotations

import argparse
import json
import math
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

from benchmarks.environment import describe_commit, describe_environment, write_results
from benchmarks.trainer_contenders import (
    Run,
    answered,
    best_of,
    divisors,
    document_of,
    fastest_rival,
    gain,
    kind_of,
    next_size,
    of_size,
    start_of,
    variants_of,
)
from benchmarks.trainer_recipes import recipe_of
from benchmarks.trainer_runs import TRAINER_FIELDS
from benchmarks.trainer_texts import longest_text

SEQ_LENGTH = 4096
SIZE_SECONDS = 2.0
ROUND_SECONDS = 4.0
VARIED_STEPS = 60
"""Micro-steps of a run whose texts differ in length."""
FAR = 0.9
"""A variant of a contender is given up at a run that is below this share of the one before's best."""
ASKED = ("micro_batch_size", "candidate", *TRAINER_FIELDS)
"""The fields of a run that say what is run."""
ANSWER = 0
"""Exit status of a client that found an answer."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_trainers", description=__doc__)
    parser.add_argument("configs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", default="0", help="indices of the GPUs, by comma; empty for the CPU")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seq-length", type=int, default=SEQ_LENGTH)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", dest="fields")
    parser.add_argument("--max-seconds", type=float, default=120.0, help="of one exploration")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contender, in turns")
    parser.add_argument("--without", nargs="+", action="extend", default=[], help="contenders that are left out")
    parser.add_argument("--start-until", type=float, default=float("inf"), help="start no model after these seconds")
    options = parser.parse_args(arguments)
    results: Run = {"environment": {}, "models": []}
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

    def __init__(self, results: Run, options: argparse.Namespace) -> None:
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
            if len(row["rounds"]) < self.options.rounds:
                ModelRun(path, row, environment, self.options, self._put).complete()
        print(describe(row), flush=True)

    def _put(self, row: Run, part: str, measured: Any) -> None:
        with self._lock:
            row[part] = measured
            write_results(self.options.out, self.results)

    def _row(self, path: Path) -> Run:
        """The row of a configuration with the fields and the batch that were asked for, a new one if there is none."""
        fields = sorted(self.options.fields)
        seq_length = min(self.options.seq_length, reach(json.loads(path.read_text())))
        key = {"model": path.stem, "fields": fields, "batch_size": self.options.batch_size, "seq_length": seq_length}
        rows: list[Run] = self.results["models"]
        row = next((row for row in rows if key.items() <= row.items()), None)
        if row is None:
            given = [field.partition("=")[2] for field in fields if field.startswith("lengths=")]
            row = {**key, "lengths": next(iter(given), None), "commit": describe_commit(), "sizes": {}, "rounds": []}
            rows.append(row)
        return row

    @contextmanager
    def _gpu(self) -> Iterator[dict[str, str]]:
        """The environment of programs that see one GPU, or none."""
        gpu = self.gpus.get()
        try:
            yield {"HF_HUB_OFFLINE": "1", **os.environ, "CUDA_VISIBLE_DEVICES": gpu}  # else kernels are waited for
        finally:
            self.gpus.put(gpu)


class ModelRun:
    """The parts of one row: exploration, the sizes of the contenders, and their runs in turns."""

    def __init__(
        self,
        path: Path,
        row: Run,
        environment: Mapping[str, str],
        options: argparse.Namespace,
        put: Callable[[Run, str, Any], None],
    ) -> None:
        self._path = path
        self._row = row
        self._environment = environment
        self._options = options
        self._put = put
        self._device = "cuda:0" if environment["CUDA_VISIBLE_DEVICES"] else "cpu"
        command = [sys.executable, "-m", "benchmarks.trainer_runs", str(path.absolute())]
        self._trainer = subprocess.Popen(  # it imports while the service starts
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(environment)
        )

    def complete(self) -> None:
        """Measure what the row lacks."""
        with self._trainer:
            if "exploration" not in self._row:
                self._put(self._row, "exploration", self._explore())
            contenders: dict[str, Run | None] = {}
            for name, variants in variants_of(self._row).items():
                kind = kind_of(name)
                if kind in self._options.without:
                    continue
                if name not in self._row["sizes"]:
                    self._put(self._row, "sizes", {**self._row["sizes"], name: self._size(name, variants)})
                runs = [*self._row["sizes"][name], *filter(None, [contenders.get(kind)])]
                contenders[kind] = best_of(runs)
            contenders["recommended"] = answered(self._row)
            in_turn = {name: run for name, run in contenders.items() if run is not None}
            rounds = [made for made in self._row["rounds"] if made.keys() == in_turn.keys()]
            while len(rounds) < self._options.rounds:
                rounds = [*rounds, {name: self._train(run, ROUND_SECONDS) for name, run in in_turn.items()}]
                self._put(self._row, "rounds", rounds)
            run = contenders["recommended"]
            if self._row["lengths"] is not None and run is not None and "longest" not in self._row:
                self._put(self._row, "longest", self._train(run, SIZE_SECONDS, longest=True))

    def _size(self, name: str, variants: Sequence[Run]) -> list[Run]:
        """Short runs that find the best size and the best variant of a contender."""
        made: list[Run] = []
        for variant in variants:
            runs: list[Run] = []
            start, own = start_of(name, self._row, made), best_of(made)
            before, failed = own or fastest_rival(name, self._row), 0.0 if own else math.inf
            while (size := next_size(divisors(self._row["batch_size"]), runs, start)) is not None:
                runs.append(self._train(of_size(variant, size), SIZE_SECONDS))
                speed = runs[-1].get("tokens_per_second", failed)  # without any run that fits, smaller sizes follow
                if before is not None and speed < FAR * before["tokens_per_second"]:
                    break
            made += runs
        return made

    def _explore(self) -> Run:
        """Explore through the service; the document of `bexp best --json`, None if there is no answer."""
        asked = ["--fresh", "--target", "transformers", "--seq-length", str(self._row["seq_length"])]
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

    def _train(self, run: Run, seconds: float, *, longest: bool = False) -> Run:
        """One run of the Trainer, on the texts of the row or on the longest of them alone."""
        asked = {key: run[key] for key in ASKED if key in run}
        wanted: Run = {key: self._row[key] for key in ("seq_length", "batch_size")}
        recipe = recipe_of(self._row["exploration"]["document"])
        wanted |= {**asked, "lengths": self._row.get("lengths"), "max_seconds": seconds, "recipe": recipe}
        if longest:
            wanted |= {"lengths": None, "seq_length": longest_text(wanted["lengths"], wanted["seq_length"])}
        elif wanted["lengths"] is not None:
            wanted["steps"] = VARIED_STEPS
        if "candidate" in asked:
            wanted["recommendation"] = document_of(self._row, asked["candidate"])
        assert self._trainer.stdin is not None
        assert self._trainer.stdout is not None
        self._trainer.stdin.write(json.dumps(wanted) + "\n")
        self._trainer.stdin.flush()
        answer = self._trainer.stdout.readline()
        if not answer:
            raise RuntimeError("benchmarks.trainer_runs has ended")
        made: Run = json.loads(answer)
        return made

    def _client(self, arguments: Sequence[str], folder: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "bexp.api.cli", *arguments]
        paths = os.pathsep.join(filter(None, [str(Path.cwd()), self._environment.get("PYTHONPATH")]))
        environment = {**self._environment, "BEXP_DATABASE_URL": f"sqlite:///{folder}/bexp.db", "PYTHONPATH": paths}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=folder)


def reach(config: Run) -> int:
    """The longest sequence that a configuration has positions for."""
    return int(next((config[key] for key in ("max_position_embeddings", "n_positions") if key in config), SEQ_LENGTH))


def describe(row: Run) -> str:
    """One line for a person."""
    over = {name: gain(row["rounds"], name) for name in (row["rounds"] or [{}])[0] if name != "recommended"}
    gains = ", ".join(f"{value:.3f}x {name}" for name, value in over.items() if value is not None)
    named = " ".join([row["model"], *row["fields"]])
    seconds = row["exploration"]["wall_seconds"]
    return f"{named}: {gains or 'no recommendation, or it failed'}, answered after {seconds:.0f} s"


def _print_error(done: Any) -> None:
    error = done.exception()
    if error is not None:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
