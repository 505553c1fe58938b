"""Holds the answer of `bexp tune` for training commands against sweeps of the same commands.

    python -m benchmarks.tuned_commands --out results/h100-tuned-commands.json
    python -m benchmarks.tuned_commands plain encoder --tiny --out F

The commands are in `benchmarks/commands`; none of them knows bexp. For each there are, one after the other:

- `tune`: `bexp tune -- COMMAND`, by the clock of whoever waits, with the time of each start of the command;
- `start_seconds`: the command itself with a single optimizer step;
- `sweep`: the command itself, with its own stop-watch, at each size that divides its batch: from the answer upwards
  until it runs out of memory, then downwards until it is 10% slower than the best; `--rounds` times in turns. Of padded
  texts, the first micro-steps of each width take longer, and a few steps meet more of them than an epoch does: its
  `samples_per_second` follow from the micro-steps by a fit, and `own_samples_per_second` are those of the stop-watch;
- `longest`, where texts are padded: the command at the answer's size with nothing but the longest texts, 50
  micro-batches of them. No 50 of 100,000 micro-batches that are drawn from the same texts need more memory.

`--processes 2` starts each command with torchrun, on as many devices. Batches and speeds are those of one device, and
so are the new widths of a sweep.

The file is written after each part. A second start measures what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.commands.texts import real_lengths
from benchmarks.environment import describe_commit, describe_environment, write_results
from benchmarks.trainer_runs import varied_seconds

BATCHES = {"full": 64, "adapters": 16, "reward": 64, "encoder": 256, "plain": 64, "compiled": 64}
"""Sequences of an optimizer step of each command. Sizes are their divisors, as those of `bexp tune` are."""
HAS_OWN_LOOP = ("plain",)
"""Commands whose size stands in the command."""
LONGEST_TEXTS = {"full": (2048, 1), "reward": (1024, 2), "encoder": (512, 1), "plain": (1024, 1)}
"""Tokens of the longest text, and texts of a sample, of the commands that pad."""
LONGEST_TINY = 128
EPOCHS = 20
STEPS, STEPS_ALIKE, MICRO_STEPS = 6, 4, 14
"""At least, of a run. Where all micro-steps are alike, a few show as much."""
FAR = 0.9
"""Sizes below one that has this share of the best speed are not tried."""
LONGEST = 50
OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory")
COUNTED = 'date +%s.%N >> "$STARTS"; exec "$@"'
"""A command that writes down each of its starts."""

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuned_commands", description=__doc__)
    parser.add_argument("commands", nargs="*", metavar="NAME")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", default="cuda:0", help="cuda:0 or cpu")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try this out")
    parser.add_argument("--start-until", type=float, default=float("inf"), help="begin no part after these seconds")
    options = parser.parse_args(arguments)
    results: Row = json.loads(options.out.read_text()) if options.out.exists() else {"commands": {}}
    results["environment"] = describe_environment()
    ends_at = time.monotonic() + options.start_until
    with tempfile.TemporaryDirectory() as folder:
        for name in options.commands or BATCHES:
            key = name if options.processes == 1 else f"{name}, {options.processes} processes"
            fresh: Row = {"batch_size": BATCHES[name], "commit": describe_commit(), "sweep": []}
            row = results["commands"].setdefault(key, fresh)
            for part, measure in parts(name, row, options, Path(folder)):
                if time.monotonic() > ends_at:
                    return 1
                row[part] = measure()
                print(f"{name} {part}: {json.dumps(row[part])[:600]}", flush=True)
                write_results(options.out, results)
    return 0


def parts(name: str, row: Row, options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the parts that a row lacks, each with the function that measures it."""
    command = Command(name, row["batch_size"], options, folder)
    if "tune" not in row:
        yield "tune", command.tune
    answer = row["tune"]["micro_batch_size"]
    if "start_seconds" not in row:
        yield "start_seconds", lambda: command.run(answer or 1, steps=1)["seconds"]
    while len(row["sweep"]) < options.rounds:
        yield "sweep", lambda: [*row["sweep"], command.sweep(answer or 1)]
    if name in LONGEST_TEXTS and "longest" not in row and answer is not None:
        yield "longest", lambda: command.run(answer, steps=LONGEST * answer // row["batch_size"] or 1, longest=True)


class Command:
    """One of the commands, with the batch that it always has."""

    def __init__(self, name: str, batch_size: int, options: argparse.Namespace, folder: Path) -> None:
        self._name = name
        self._batch_size = batch_size
        self._options = options
        self._folder = folder

    @property
    def has_own_size(self) -> bool:
        """Whether the size stands in the command."""
        return self._name in HAS_OWN_LOOP

    def tune(self) -> Row:
        begun, starts = time.time(), self._folder / "starts"
        starts.write_text("")
        database = f"sqlite:///{self._folder}/{self._name}.db"
        environment = self._environment() | {"BEXP_DATABASE_URL": database, "STARTS": str(starts)}
        is_own = self.has_own_size
        sized = ["--batch-size", str(self._batch_size)] if is_own else []
        size = ("{micro_batch_size}", "{grad_accum_steps}") if is_own else (4, self._batch_size // 4)
        command = ["sh", "-c", COUNTED, "sh", *self._arguments(*size)]
        client = [sys.executable, "-m", "bexp.api.cli"]
        number = self._options.processes
        device = self._options.device if number == 1 or self._options.device == "cpu" else f"cuda:0-{number - 1}"
        limit = getattr(self._options, "max_seconds", None)
        limited = [] if limit is None else ["--max-seconds", str(limit)]
        asked = [*client, "tune", "--device", device, *limited, *sized, "--", *command]
        done = subprocess.run(asked, env=environment, capture_output=True, text=True, check=False)
        seconds = time.time() - begun
        best = [*client, "best", "latest", "--json"]
        said = subprocess.run(best, env=environment, capture_output=True, text=True, check=False)
        stored = json.loads(said.stdout or "{}")
        document, found = stored.get("job", {}), stored.get("recommendation") or {}
        return {
            "micro_batch_size": document.get("micro_batch_size"),
            "confidence": document.get("confidence"),
            "tokens_per_second": document.get("tokens_per_second"),
            "counts_tokens": document.get("rate_unit") != "samples",
            "peak_bytes": found.get("measured_peak_bytes"),
            "seconds": seconds,
            "starts": [float(line) - begun for line in starts.read_text().splitlines()],
            "log": done.stdout.splitlines(),
            "errors": done.stderr.splitlines()[-20:],
        }

    def sweep(self, answer: int) -> list[Row]:
        """One run at each size that divides the batch and may be the best."""
        sizes = [size for size in range(1, self._batch_size + 1) if self._batch_size % size == 0]
        runs: list[Row] = []
        for size in [size for size in sizes if size >= answer]:
            runs.append(self.run(size, steps=self._steps(size)))
            if runs[-1]["samples_per_second"] is None:
                break
        for size in [size for size in reversed(sizes) if size < answer]:
            runs.append(self.run(size, steps=self._steps(size)))
            speeds = [run["samples_per_second"] or 0.0 for run in runs]
            if 0 < speeds[-1] < FAR * max(speeds):
                break
        return sorted(runs, key=lambda run: int(run["micro_batch_size"]))

    def run(self, size: int, *, steps: int, longest: bool = False) -> Row:
        """Run the command itself."""
        more = ["--max_steps", str(steps), *(["--longest", str(LONGEST)] if longest else [])]
        begun = time.perf_counter()
        asked = [*self._arguments(size, self._batch_size // size), *more]
        done = subprocess.run(asked, env=self._environment(), capture_output=True, text=True, check=False)
        figures: Row = {"micro_batch_size": size, "seconds": time.perf_counter() - begun, "samples_per_second": None}
        if done.returncode == 0:
            own: Row = json.loads(next(line for line in done.stdout.splitlines()[::-1] if line.startswith("{")))
            return figures | (own if steps == 1 or longest else self._in_an_epoch(size, own))
        if not any(text in done.stderr for text in OUT_OF_MEMORY):
            raise RuntimeError(done.stderr[-2000:])
        return figures | {"failed": "out of memory"}

    def _steps(self, size: int) -> int:
        if self._name not in LONGEST_TEXTS:
            return STEPS_ALIKE
        return max(STEPS, -(-MICRO_STEPS * size // self._batch_size))

    def _in_an_epoch(self, size: int, own: Row) -> Row:
        """The figures of a run, with the speed that it has in the mean over an epoch."""
        if self._name not in LONGEST_TEXTS:
            return own
        longest, texts = LONGEST_TEXTS[self._name]
        lengths = np.array(real_lengths(LONGEST_TINY if self._options.tiny else longest))
        rng, mean, new = np.random.default_rng(0), [], []
        for _ in range(EPOCHS):
            number = len(lengths) // (size * self._options.processes)
            widths = np.max([rng.permutation(lengths)[: number * size].reshape(-1, size) for _ in range(texts)], (0, 2))
            mean.append(size * texts * widths.mean())
            new.append(len(np.unique(widths)) / number)
        steps = own["micro_step_seconds"]
        seconds = varied_seconds(steps, own["positions"], len(steps[0]), float(np.mean(mean)), float(np.mean(new)))
        own_speed = {"own_samples_per_second": own["samples_per_second"]}
        return own | own_speed | {"samples_per_second": self._batch_size / seconds}

    def _arguments(self, size: object, accumulation: object) -> list[str]:
        tiny = ["--tiny"] if self._options.tiny else []
        launcher = ("torch.distributed.run", "--standalone", "--nproc_per_node", str(self._options.processes), "-m")
        script = [sys.executable, "-m", *(launcher if self._options.processes > 1 else ())]
        script += [f"benchmarks.commands.{self._name}", *tiny]
        script += ["--output_dir", str(self._folder / "out")]
        sizes = ["--per_device_train_batch_size", str(size), "--gradient_accumulation_steps", str(accumulation)]
        return [*script, *sizes]

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
        found = {**os.environ, "PYTHONPATH": path}
        return found | ({"CUDA_VISIBLE_DEVICES": ""} if self._options.device == "cpu" else {})


if __name__ == "__main__":
    raise SystemExit(main())
