"""Runs transformers' own Trainer for a few steps, each run in a process of its own.

    python -m benchmarks.trainer_runs CONFIG.json --seq-length 2048 --runs '[{"micro_batch_size": 4}]' --out runs.json
    python -m benchmarks.trainer_runs CONFIG.json --seq-length 2048 --sweep --out sweep.json

A run is one Trainer of 20 micro-steps on random text in the model's own format, under the allocator's setting that the
run names. With `--batch-size`, micro-batches are accumulated, up to three of them a step, so that gradients exist when
memory is at its peak. Throughput is then that of whole steps of the batch: micro-steps count as often as it takes them,
the rest of the step once. Without it, each micro-batch is a step.

`--sweep` tries every micro-batch size from 1 upwards without gradient checkpointing, and those that do not fit so, and
the largest that does, with it: at a size that fits, checkpointing only adds work. Each half ends when memory runs out
or throughput has fallen twice by more than 2%. A `recommendation` in a run is applied by `bexp.apply`.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.environment import describe_environment, write_results

if TYPE_CHECKING:
    import torch

    from bexp.measure.timestamps import Mark

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MICRO_STEPS = 20
WARM_UP = 5
"""Micro-steps that no figure contains."""
MIN_MICRO_STEPS = 8
ACCUMULATED = 3
"""Micro-steps of a step: the first writes gradients, the second adds to them, the last also updates the weights."""
FALL = 0.98
ALLOCATORS = {"default": "", "expandable_segments": "expandable_segments:True"}


def main(arguments: list[str] | None = None) -> int:
    """Run everything that is asked for and write one JSON file, after each run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer_runs", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--seq-length", type=int, required=True)
    parser.add_argument("--runs", type=json.loads, default=[])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--allocator", choices=ALLOCATORS, default="default")
    parser.add_argument("--padding", action="store_true", help="texts of half the length to all of it")
    parser.add_argument("--batch-size", type=int, help="sequences of a step; default: those of a micro-batch")
    parser.add_argument("--steps", type=int, default=MICRO_STEPS, help="micro-steps of a run")
    parser.add_argument(
        "--max-seconds", type=float, default=15.0, help="a run ends after so long, with 8 micro-steps at least"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    config = json.loads(options.config.read_text())
    common = {
        "seq_length": options.seq_length,
        "allocator": options.allocator,
        "padding": options.padding,
        "batch_size": options.batch_size,
        "steps": options.steps,
        "max_seconds": options.max_seconds,
    }
    runs_made: list[dict[str, Any]] = []
    runs: Iterator[dict[str, Any]] = iter(options.runs)
    for run in [*runs] if not options.sweep else _sweep(runs_made, options.batch_size):
        runs_made.append(run_trainer(config, {**common, **run}))
        print(_line(runs_made[-1]), flush=True)
        results = {"model": options.config.stem, "environment": describe_environment(), "runs": runs_made}
        write_results(options.out, results)
    return 0


def _sweep(made: list[dict[str, Any]], batch_size: int | None = None) -> Iterator[dict[str, Any]]:
    """The next run, given those that have been made. No micro-batch is larger than the batch."""
    largest = 1
    sizes = [size for size in SIZES if batch_size is None or size <= batch_size]
    for checkpointing in (False, True):
        best, falls = 0.0, 0
        for size in (size for size in sizes if size >= largest):
            yield {"micro_batch_size": size, "gradient_checkpointing": checkpointing}
            speed = made[-1].get("tokens_per_second")
            if speed is None:
                break
            largest = size
            falls = falls + 1 if speed < FALL * best else 0
            best = max(best, speed)
            if falls == 2:
                break


def run_trainer(config: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """One run in a process of its own: what was asked for, and what it reached or why it failed."""
    import transformers  # noqa: F401, PLC0415 - once, for all processes that are forked from this one
    from transformers import Trainer  # noqa: F401, PLC0415 - after the process has set the allocator

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    started = time.perf_counter()
    process = context.Process(target=_child, args=(config, run, sender))
    process.start()
    sender.close()
    try:
        result: dict[str, Any] = receiver.recv()
    except EOFError:
        result = {"error": "the process ended without a result"}
    process.join()
    return {**run, **result, "wall_seconds": time.perf_counter() - started}


def _child(config: dict[str, Any], run: dict[str, Any], sender: Any) -> None:
    os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    os.environ["PYTORCH_ALLOC_CONF"] = ALLOCATORS[run["allocator"]]
    import torch  # noqa: PLC0415 - the allocator reads its setting when it is first used

    try:
        sender.send(_train(config, run))
    except torch.OutOfMemoryError as error:
        sender.send({"error": "out of memory", "message": str(error)[:300]})
    except Exception as error:  # noqa: BLE001 - whatever a model raises is the run's result
        sender.send({"error": type(error).__name__, "message": str(error)[:600]})


def _train(config: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    import torch  # noqa: PLC0415 - after the process has set the allocator
    from transformers import Trainer, TrainingArguments  # noqa: PLC0415 - after the process has set the allocator

    cuda = torch.cuda.is_available()
    torch.manual_seed(0)
    model = build(config, "cuda" if cuda else "cpu")
    described = {}
    if "recommendation" in run:
        import bexp  # noqa: PLC0415 - only where it is applied

        described["applied"] = str(bexp.apply(model, run["recommendation"]))
    texts = Texts(model.config.get_text_config(decoder=True).vocab_size, run["seq_length"], padding=run["padding"])
    accumulated = micro_steps_of(run["micro_batch_size"], run["batch_size"])
    clock = Clock(torch.device("cuda" if cuda else "cpu"), run["max_seconds"])
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=run["micro_batch_size"],
            gradient_checkpointing=run.get("gradient_checkpointing", False),
            torch_compile=run.get("torch_compile", False),
            gradient_accumulation_steps=accumulated,
            max_steps=math.ceil(run["steps"] / accumulated),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
            use_cpu=not cuda,
            dataloader_drop_last=True,
        )
        trainer = Trainer(model=model, args=settings, train_dataset=texts, callbacks=[clock.callback()])
        training_loss = trainer.train().training_loss
    sequences = run["batch_size"] or run["micro_batch_size"]
    seconds = batch_seconds(clock.steps, run["micro_batch_size"], run["batch_size"])
    return {
        **described,
        "training_loss": training_loss,
        "micro_step_seconds": clock.steps,
        "tokens_per_second": sequences * run["seq_length"] / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "allocation_retries": torch.cuda.memory_stats()["num_alloc_retries"] if cuda else None,
    }


def micro_steps_of(micro_batch_size: int, batch_size: int | None) -> int:
    """How many micro-steps a step of a run accumulates."""
    return 1 if batch_size is None else max(1, min(ACCUMULATED, batch_size // micro_batch_size))


def batch_seconds(steps: Sequence[Sequence[float]], micro_batch_size: int, batch_size: int | None) -> float:
    """Seconds of a step of the whole batch, by the medians of those micro-steps that are past the warm-up.

    The first micro-step of a step writes gradients, the last one also updates the weights; those in between are alike,
    and occur as often as the batch takes them. That number may be a fraction, so that a batch which does not divide
    favours no size.
    """
    length = len(steps[0])
    warm = steps[min(math.ceil(WARM_UP / length), len(steps) - 1) :]
    seconds = [statistics.median(step[i] for step in warm) for i in range(length)]
    wanted = length if batch_size is None else batch_size / micro_batch_size
    return sum(seconds) + (wanted - length) * (seconds[-2] if length > 1 else seconds[0])


def build(config: dict[str, Any], device: str) -> Any:
    """The model with random weights in bfloat16, as `from_pretrained(..., dtype=torch.bfloat16)` leaves one."""
    import torch  # noqa: PLC0415 - after the process has set the allocator
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - after the process has set the allocator

    settings = {key: value for key, value in config.items() if key != "model_type"}
    resolved = AutoConfig.for_model(config["model_type"], **settings)
    resolved.use_cache = False
    with torch.device(device):
        return AutoModelForCausalLM.from_config(resolved, dtype=torch.bfloat16)


class Texts:
    """Random tokens; padded texts are at least half as long as the others."""

    def __init__(self, vocab_size: int, seq_length: int, *, padding: bool) -> None:
        self._vocab_size, self._seq_length, self._padding = vocab_size, seq_length, padding

    def __len__(self) -> int:
        """More than any run takes."""
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Token ids and labels, shape (S,)."""
        import torch  # noqa: PLC0415 - after the process has set the allocator

        generator = torch.Generator().manual_seed(index)
        ids_S = torch.randint(10, self._vocab_size, (self._seq_length,), generator=generator)
        labels_S = ids_S.clone()
        item = {"input_ids": ids_S, "labels": labels_S}
        if self._padding:
            length = int(torch.randint(self._seq_length // 2, self._seq_length + 1, (), generator=generator))
            mask_S = (torch.arange(self._seq_length) < length).long()
            labels_S[length:] = -100
            item["attention_mask"] = mask_S
        return item


class Clock:
    """Seconds of each micro-step of each step, by the device's own clock; ends a run that takes too long."""

    def __init__(self, device: torch.device, max_seconds: float) -> None:
        from bexp.measure.timestamps import mark_of  # noqa: PLC0415 - torch is imported once the allocator is set

        self.steps: list[list[float]] = []
        self._device = device
        self._mark = mark_of(device)
        self._max_seconds = max_seconds
        self._marks: list[Mark] = []

    def callback(self) -> Any:
        """What the Trainer calls after each micro-step and each step."""
        from transformers import TrainerCallback  # noqa: PLC0415 - after the process has set the allocator

        clock = self

        class MicroStepClock(TrainerCallback):
            """Marks the ends of micro-steps; waits for the device at the end of each step."""

            def on_train_begin(self, *_: Any, **__: Any) -> None:
                """The first micro-step begins."""
                clock._marks = [clock._mark()]

            def on_substep_end(self, *_: Any, **__: Any) -> None:
                """A micro-step has ended that is not the last of its step."""
                clock._marks.append(clock._mark())

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                """A step has ended, and the next begins."""
                if clock._end_step():
                    control.should_training_stop = True

        return MicroStepClock()

    def _end_step(self) -> bool:
        """Note the step's seconds, and return whether the run has taken long enough."""
        import torch  # noqa: PLC0415 - after the process has set the allocator

        end = self._mark()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        marks = [*self._marks, end]
        self.steps.append([earlier.seconds_until(later) for earlier, later in pairwise(marks)])
        self._marks = [self._mark()]
        seconds = [micro_step for step in self.steps for micro_step in step]
        return len(seconds) >= MIN_MICRO_STEPS and sum(seconds) > self._max_seconds


def _line(run: dict[str, Any]) -> str:
    settings = f"m={run['micro_batch_size']} checkpointing={run.get('gradient_checkpointing', False)}"
    settings += " torch_compile" if run.get("torch_compile") else ""
    if "error" in run:
        return f"{settings}: {run['error']} ({run.get('message', '')[:200]})"
    peak = (run["peak_reserved_bytes"] or 0) / 2**30
    return f"{settings}: {run['tokens_per_second']:.0f} tokens/s, {peak:.2f} GiB reserved, {run['wall_seconds']:.1f} s"


if __name__ == "__main__":
    raise SystemExit(main())
