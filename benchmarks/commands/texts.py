"""Texts of real lengths, and the script's own stop-watch."""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import TrainerCallback

positions: list[int] = []
"""Tokens of each micro-batch that was made, padding included."""
CHARACTERS = 4
"""Of a token, as tokenizers of today cut English and code."""
WARM_UP_STEPS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What every script takes. `--longest N` leaves only the texts of the N micro-batches with the longest ones."""
    parser.add_argument("--per_device_train_batch_size", type=int, default=4)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=16)
    parser.add_argument("--max_steps", type=int, default=-1)
    parser.add_argument("--longest", type=int)
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU trains in seconds")
    parser.add_argument("--output_dir", default="out")


def save_strategy(options: argparse.Namespace) -> str:
    """Checkpoints are for whole trainings: of a few steps that are timed, they would take longer than the steps."""
    return "steps" if options.max_steps < 0 else "no"


@cache
def real_lengths(longest: int) -> tuple[int, ...]:
    """Tokens of the files and of the blocks of Python's standard library: many short texts, and a long tail."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = [path.read_text(errors="replace") for path in sorted(folder.glob("*.py"))]
    blocks = [block for text in texts for block in text.split("\n\n\n")]
    return tuple(min(longest, max(8, len(text) // CHARACTERS)) for text in [*texts, *blocks])


class Texts(Dataset[dict[str, Any]]):
    """Random tokens with the lengths that real texts have."""

    def __init__(self, options: argparse.Namespace, longest: int, vocabulary: int) -> None:
        self.lengths = list(real_lengths(longest))
        self._vocabulary = vocabulary
        if options.longest is not None:
            self.lengths.sort(reverse=True)
            del self.lengths[options.longest * options.per_device_train_batch_size :]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, place: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(place)
        return {"input_ids": torch.randint(5, self._vocabulary, (self.lengths[place],), generator=generator).tolist()}


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad a micro-batch to its longest text; padding has no label."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    tokens = torch.zeros(len(samples), longest, dtype=torch.long)
    mask, labels = torch.zeros_like(tokens), torch.full_like(tokens, -100)
    for row, sample in enumerate(samples):
        text = torch.tensor(sample["input_ids"])
        tokens[row, : len(text)] = labels[row, : len(text)] = text
        mask[row, : len(text)] = 1
    positions.append(tokens.numel())
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


class Watch(TrainerCallback):
    """Prints samples a second from the first optimizer steps to the last, the peak of all, and each micro-step."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._steps = 0
        self._began = self._ended = 0.0
        self._marks: list[list[Any]] = [[_now()]]

    def micro_step(self) -> None:
        self._marks[-1].append(_now())

    def step(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._marks[-1][-1] = _now()
        self._marks.append([_now()])
        self._steps += 1
        self._ended = time.perf_counter()
        if self._steps == WARM_UP_STEPS:
            self._began = self._ended

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self.micro_step()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """The Trainer's step has ended."""
        self.micro_step()
        self.step()

    def tell(self) -> None:
        """Print the figures as the last line."""
        steps, seconds = self._steps - WARM_UP_STEPS, self._ended - self._began
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        speed = steps * self._samples / seconds if steps > 0 else None
        each = [[_between(*pair) for pair in pairwise(marks)] for marks in self._marks[:-1]]
        figures = {"samples_per_second": speed, "peak_bytes": peak, "micro_step_seconds": each, "positions": positions}
        print(json.dumps({"steps": self._steps, **figures}), flush=True)


def _now() -> Any:
    """A mark in the device's own time, which makes nobody wait; on a CPU the time itself."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


def _between(earlier: Any, later: Any) -> float:
    return later - earlier if isinstance(later, float) else float(earlier.elapsed_time(later)) / 1000
