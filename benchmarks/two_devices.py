"""Holds the answer of `bexp tune` for trainings over two or more devices against sweeps of the same commands.

    python -m benchmarks.two_devices --out results/h200-two-devices.json
    python -m benchmarks.two_devices fsdp2 loop --out F --start-until 300
    python -m benchmarks.two_devices fsdp2 --tiny --device cpu --out F

Each run is one of `benchmarks/commands/sharded.py`: transformers' Trainer with FSDP2 (`fsdp2`), with ZeRO-3 (`zero3`),
with ZeRO-2 and LoRA (`zero2-lora`), without sharding (`ddp`), and a loop of its own with FSDP2 (`loop`). For each:

- `tune`, by the clock of whoever waits;
- `sweep`: the command itself at half the answer, at the answer and at twice the answer;
- `judged`: the speed of the answer over the best of the sweep; the promised speed and peak over those of the command at
  the answer; `too_large`, whether a size ran out of memory; and `off`, what is further off than it may be.

Speeds and batches are those of one device.

The file is written after each part. A second start measures what is missing. `zero3` and `zero2-lora` need DeepSpeed,
`zero2-lora` also peft; without them a run says so.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.commands.sharded import LENGTH
from benchmarks.environment import describe_commit, describe_environment, write_results
from benchmarks.tuned_commands import Command, Row

NEEDS = {"fsdp2": (), "zero3": ("deepspeed",), "zero2-lora": ("deepspeed", "peft"), "ddp": (), "loop": ()}
"""The packages of each run."""
BATCH_SIZE = 32
"""Sequences of a device's optimizer step."""
MAX_SECONDS = 240
"""Of the trials, the starts of the command included: one with DeepSpeed takes up to 80 s."""
STEPS = 5
WITHIN = {"speed": 0.02, "promised_speed": 0.05, "promised_peak": 0.04}
"""What each figure of `judged` may be off."""


class ShardedCommand(Command):
    """One of the runs. DeepSpeed takes its sizes when the arguments are made, so that they stand in the command."""

    def __init__(self, how: str, options: argparse.Namespace, folder: Path) -> None:
        super().__init__("sharded", BATCH_SIZE, options, folder)
        self._how = how

    @property
    def has_own_size(self) -> bool:
        return self._how not in ("fsdp2", "ddp")

    def _arguments(self, size: object, accumulation: object) -> list[str]:
        return [*super()._arguments(size, accumulation), "--how", self._how]

    def around(self, answer: int) -> list[Row]:
        """Run the command at half the answer, at the answer and at twice the answer."""
        sizes = [size for size in (answer, answer * 2, answer // 2) if size and BATCH_SIZE % size == 0]
        return sorted((self.run(size, steps=STEPS) for size in sizes), key=lambda run: int(run["micro_batch_size"]))


def judge(tune: Mapping[str, Any], sweep: Sequence[Mapping[str, Any]], length: int) -> Row:
    """Return the figures of an answer next to those of the command, and which are further off than they may be."""
    own = next(run for run in sweep if run["micro_batch_size"] == tune["micro_batch_size"])
    if own["samples_per_second"] is None:
        return {"off": ["out of memory"]}
    best = max(run["samples_per_second"] or 0.0 for run in sweep)
    promised = tune["tokens_per_second"] / length if tune["counts_tokens"] else tune["tokens_per_second"]
    figures = {
        "speed": own["samples_per_second"] / best - 1,
        "promised_speed": promised / own["samples_per_second"] - 1,
        "promised_peak": tune["peak_bytes"] / own["peak_bytes"] - 1 if own["peak_bytes"] else None,  # a CPU has none
    }
    off = [name for name, value in figures.items() if value is not None and abs(value) > WITHIN[name]]
    return {**figures, "too_large": any(run["samples_per_second"] is None for run in sweep), "off": off}


def parts(how: str, row: Row, options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the parts that a row lacks, each with the function that measures it."""
    if lacking := [name for name in NEEDS[how] if find_spec(name) is None]:
        yield "not_run", lambda: f"needs {', '.join(lacking)}"
        return
    command = ShardedCommand(how, options, folder)
    if "tune" not in row:
        yield "tune", command.tune
    if (answer := row["tune"]["micro_batch_size"]) is None:
        return
    if "sweep" not in row:
        yield "sweep", lambda: command.around(answer)
    yield "judged", lambda: judge(row["tune"], row["sweep"], 32 if options.tiny else LENGTH)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.two_devices", description=__doc__)
    parser.add_argument("runs", nargs="*", metavar="NAME", help=f"of {', '.join(NEEDS)}; all without one")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0", help="cuda:0, which stands for both, or cpu")
    parser.add_argument("--processes", type=int, default=2, help="each has a device; rows of others than 2 say so")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try this out")
    parser.add_argument("--start-until", type=float, default=380.0, help="begin no part after these seconds")
    options = parser.parse_args(arguments, argparse.Namespace(max_seconds=MAX_SECONDS))
    results: Row = json.loads(options.out.read_text()) if options.out.exists() else {"runs": {}}
    results["environment"] = describe_environment()
    ends_at = time.monotonic() + options.start_until
    with tempfile.TemporaryDirectory() as folder:
        for how in options.runs or NEEDS:
            name = how if options.processes == 2 else f"{how}, {options.processes} processes"
            row = results["runs"].setdefault(name, {"batch_size": BATCH_SIZE, "commit": describe_commit()})
            for part, measure in parts(how, row, options, Path(folder)):
                if time.monotonic() > ends_at:
                    return 1
                row[part] = measure()
                print(f"{name} {part}: {json.dumps(row[part])[:600]}", flush=True)
                write_results(options.out, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
