"""Runs transformers' own Trainer for a few steps, each run in a process of its own.

    echo '{"seq_length": 2048, "micro_batch_size": 4}' | python -m benchmarks.trainer_runs CONFIG.json

Each line of the input is a run, and is answered by a line that adds what it reached or why it failed. A run is one
Trainer of 20 micro-steps on random text in the model's own format. With a `batch_size`, micro-batches are accumulated,
up to three of them a step, so that gradients exist when memory is at its peak. Throughput is then that of whole steps
of the batch: micro-steps count as often as it takes them, the rest of the step once. Without it, each micro-batch is a
step. With `lengths` of a request, texts have these lengths, micro-batches are padded or packed, and padding does not
count.

A `recommendation` in a run is the document of `bexp best --json`. It is applied as the README does it, by `bexp.apply`
and `bexp.training_arguments`. Other runs may name `gradient_checkpointing`, `torch_compile` and `use_liger_kernel`. A
`recipe`, see `trainer_recipes`, names adapters, quantised weights, the optimizer and packed texts of all of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.trainer_recipes import adapt, checkpoint_folder, fields_of, load_quantized
from benchmarks.trainer_texts import Collator, Texts

if TYPE_CHECKING:
    import torch

    from bexp.measure.timestamps import Mark

DEFAULTS: dict[str, Any] = {"lengths": None, "batch_size": None, "steps": 20, "max_seconds": 15.0, "recipe": {}}
"""Of a run: the lengths of texts, sequences of a step, micro-steps, when it may end, how the model is fine-tuned."""
WARM_UP = 5
"""Micro-steps that no figure contains: the first of each length load kernels, and make the allocator's cache grow."""
MIN_MICRO_STEPS = 8
ACCUMULATED = 3
"""Micro-steps of a step: the first writes gradients, the second adds to them, the last also updates the weights."""
TRAINER_FIELDS = ("gradient_checkpointing", "torch_compile", "use_liger_kernel")
OUT_OF_MEMORY = "out of memory"
LONGEST_SECONDS = 300.0
"""After these a run is ended: a kernel may hang, or be tuned for minutes."""
OPEN_THE_DEVICE = ("bitsandbytes", "torchao")
"""Packages that the Trainer imports where they are, and that open the device then; nothing can be forked after that."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer_runs", description=__doc__)
    parser.add_argument("config", type=Path)
    config = json.loads(parser.parse_args(arguments).config.read_text())
    import transformers  # noqa: F401, PLC0415 - once, for all processes that are forked from this one

    if not any(importlib.util.find_spec(name) for name in OPEN_THE_DEVICE):
        from transformers import Trainer  # noqa: F401, PLC0415 - likewise

    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # the Trainer prints, too
        with checkpoint_folder() as folder:
            for line in sys.stdin:
                made = run_trainer(config, {**DEFAULTS, "checkpoint": folder, **json.loads(line)})
                print(_line(made), file=sys.stderr, flush=True)
                print(json.dumps(made), file=answers, flush=True)
    return 0


def run_trainer(config: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """One run in a process of its own: what was asked for, and what it reached or why it failed."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    started = time.perf_counter()
    process = context.Process(target=_child, args=(config, run, sender))
    process.start()
    sender.close()
    try:
        in_time = receiver.poll(LONGEST_SECONDS)
        result: dict[str, Any] = receiver.recv() if in_time else {"error": f"ended after {LONGEST_SECONDS:g} s"}
        if not in_time:
            process.kill()
    except EOFError:
        result = {"error": "the process ended without a result"}
    process.join()
    asked = {key: value for key, value in run.items() if key not in {"recommendation", "checkpoint"}}
    return {**asked, **result, "wall_seconds": time.perf_counter() - started}


def _child(config: dict[str, Any], run: dict[str, Any], sender: Any) -> None:
    from bexp.out_of_memory import is_out_of_memory  # noqa: PLC0415 - imports torch

    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        os.environ.pop(name, None)
    try:
        sender.send(_train(config, run))
    except Exception as error:  # noqa: BLE001 - whatever a model raises is the run's result
        short = is_out_of_memory(error) or "ALLOC_FAILED" in str(error)  # as cuBLAS says it
        sender.send({"error": OUT_OF_MEMORY if short else type(error).__name__, "message": str(error)[:600]})


def _train(config: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    import torch  # noqa: PLC0415 - after the process has set the allocator
    from transformers import Trainer, TrainingArguments  # noqa: PLC0415 - likewise

    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        if "recommendation" in run:
            model, fields, applied = _as_recommended(config, run, device, folder)
        else:
            if run.get("use_liger_kernel"):
                _refuse_without_liger(config["model_type"])
            fields = {name: run[name] for name in TRAINER_FIELDS if name in run} | fields_of(run["recipe"])
            model, applied = _of_recipe(config, run, device, fields), None
            fields |= {"output_dir": folder, "per_device_train_batch_size": run["micro_batch_size"]}
        size = fields["per_device_train_batch_size"]
        accumulated = micro_steps_of(size, run["batch_size"])
        fields |= {"gradient_accumulation_steps": accumulated, "max_steps": math.ceil(run["steps"] / accumulated)}
        settings = TrainingArguments(
            **fields,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
            use_cpu=not cuda,
            dataloader_drop_last=True,
        )
        fewest = MIN_MICRO_STEPS if run["lengths"] is None else run["steps"]
        clock = Clock(device, run["max_seconds"], fewest)
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        texts = Texts(vocab_size, run["seq_length"], run["lengths"], packed=bool(run["recipe"].get("packed")))
        if run["lengths"] is not None:
            texts.repeat(size * accumulated * math.ceil(run["steps"] / accumulated / 2))
        collator = Collator()

        class InOrder(Trainer):
            """Takes texts in their order."""

            def _get_train_sampler(self, *_: Any) -> Any:
                return torch.utils.data.SequentialSampler(texts)

        trainer = InOrder(
            model=model, args=settings, train_dataset=texts, data_collator=collator, callbacks=[clock.callback()]
        )
        training_loss = trainer.train().training_loss
    batch = run["batch_size"] or size
    if run["lengths"] is None:
        seconds = batch_seconds(clock.steps, size, run["batch_size"])
    else:
        seconds = varied_seconds(clock.steps, collator.positions, batch / size, *texts.epoch(size))
    return {
        "micro_batch_size": size,
        **({} if applied is None else {"applied": applied}),
        "device_name": torch.cuda.get_device_name() if cuda else "cpu",
        "training_loss": training_loss,
        "micro_step_seconds": clock.steps,
        "tokens_per_second": batch * texts.mean / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "kept_bytes": clock.kept_bytes,
        "device_bytes": torch.cuda.mem_get_info()[1] if cuda else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "allocation_retries": torch.cuda.memory_stats()["num_alloc_retries"] if cuda else None,
    }


def _as_recommended(
    config: dict[str, Any], run: dict[str, Any], device: torch.device, folder: str
) -> tuple[Any, dict[str, Any], str]:
    import bexp  # noqa: PLC0415 - only where it is applied
    from bexp.allocator import set_allocator  # noqa: PLC0415 - likewise
    from bexp.trainer.recommended_setup import RecommendedSetup  # noqa: PLC0415 - likewise

    document = run["recommendation"]
    fields = bexp.training_arguments(document, output_dir=folder)
    set_allocator(RecommendedSetup.read(document).settings.allocator)  # the model is built on the GPU: it is faster
    model = _of_recipe(config, {**run, "recipe": {**run["recipe"], "float8": None}}, device, fields)
    return model, fields, str(bexp.apply(model, document))  # which converts to float8, too


def _of_recipe(config: dict[str, Any], run: dict[str, Any], device: torch.device, fields: dict[str, Any]) -> Any:
    recipe, name = run["recipe"], run["recipe"].get("quantization")
    if name is None:
        model = build(config, device)
    else:
        model = load_quantized(lambda: build(config, device), name, Path(run["checkpoint"]))
    return adapt(model, recipe, checkpointing=bool(fields.get("gradient_checkpointing")))


def _refuse_without_liger(model_type: str) -> None:
    """The Trainer itself says nothing of a model that liger-kernel does not know."""
    from bexp.transformers.kernels import import_liger  # noqa: PLC0415 - imports torch

    if model_type not in import_liger("monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise LookupError(f"liger-kernel does not know {model_type}")


def micro_steps_of(micro_batch_size: int, batch_size: int | None) -> int:
    return 1 if batch_size is None else max(1, min(ACCUMULATED, batch_size // micro_batch_size))


def batch_seconds(steps: Sequence[Sequence[float]], micro_batch_size: int, batch_size: int | None) -> float:
    """Seconds of a step of the whole batch, by the medians of those micro-steps that are past the warm-up.

    The first micro-step of a step writes gradients, the last one also updates the weights; those in between are alike,
    and occur as often as the batch takes them. That number may be a fraction, so that a batch which does not divide
    favours no size.
    """
    length, warm = len(steps[0]), steps[warm_up_steps(steps) :]
    seconds = [statistics.median(step[i] for step in warm) for i in range(length)]
    wanted = length if batch_size is None else batch_size / micro_batch_size
    return sum(seconds) + (wanted - length) * (seconds[-2] if length > 1 else seconds[0])


def varied_seconds(
    steps: Sequence[Sequence[float]], positions: Sequence[int], num_micro_steps: float, mean: float, new_share: float
) -> float:
    """Seconds of a step of so many micro-steps, where micro-steps differ in their tokens, padding included.

    A line through the micro-steps says what such a token costs, what the first micro-step of a width takes longer, and
    what an update adds. An epoch has a `mean` of tokens, and a `new_share` of micro-steps whose width is new.
    """
    seconds, rows = [], []
    for i, step in enumerate(steps):
        for j, micro_step in enumerate(step):
            place = i * len(step) + j
            is_new = positions[place] not in positions[:place]
            rows.append([1.0, positions[place], is_new, j == len(step) - 1])
            seconds.append(micro_step)
    warm = min(WARM_UP, len(rows) - 1)
    base, each, longer, update = np.linalg.lstsq(np.array(rows[warm:], float), np.array(seconds[warm:]), rcond=None)[0]
    return float(num_micro_steps * (base + each * mean + longer * new_share) + update)


def warm_up_steps(steps: Sequence[Sequence[float]]) -> int:
    """How many steps no figure contains."""
    return min(math.ceil(WARM_UP / len(steps[0])), len(steps) - 1)


def build(config: dict[str, Any], device: torch.device) -> Any:
    """The model with random weights in bfloat16, as `from_pretrained(..., dtype=torch.bfloat16)` leaves one."""
    import torch  # noqa: PLC0415 - after the process has set the allocator
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - after the process has set the allocator

    settings = {key: value for key, value in config.items() if key != "model_type"}
    resolved = AutoConfig.for_model(config["model_type"], **settings)
    resolved.use_cache = False
    with torch.device(device):
        return AutoModelForCausalLM.from_config(resolved, dtype=torch.bfloat16)


class Clock:
    """Seconds of each micro-step of each step, by the device's own clock; ends a run that takes too long."""

    def __init__(self, device: torch.device, max_seconds: float, fewest: int = MIN_MICRO_STEPS) -> None:
        from bexp.measure.timestamps import mark_of  # noqa: PLC0415 - torch is imported once the allocator is set

        self.steps: list[list[float]] = []
        self.device = device
        self.kept_bytes: int | None = None
        """What stays allocated between micro-steps: weights, gradients, the optimizer's state."""
        self._mark = mark_of(device)
        self._max_seconds, self._fewest = max_seconds, fewest
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

            def on_optimizer_step(self, *_: Any, **__: Any) -> None:
                """The weights are updated, and the gradients still exist."""
                clock._note_kept_bytes()

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                """A step has ended, and the next begins."""
                if clock._end_step():
                    control.should_training_stop = True

        return MicroStepClock()

    def _note_kept_bytes(self) -> None:
        import torch  # noqa: PLC0415 - after the process has set the allocator

        if self.device.type == "cuda":
            self.kept_bytes = torch.cuda.memory_allocated(self.device)

    def _end_step(self) -> bool:
        """Note the step's seconds, and return whether the run has taken long enough; the first step may compile."""
        import torch  # noqa: PLC0415 - after the process has set the allocator

        end = self._mark()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        marks = [*self._marks, end]
        self.steps.append([earlier.seconds_until(later) for earlier, later in pairwise(marks)])
        self._marks = [self._mark()]
        seconds = [micro_step for step in self.steps[1:] for micro_step in step]
        return len(seconds) >= self._fewest and sum(seconds) > self._max_seconds


def _line(run: dict[str, Any]) -> str:
    named = [name for name in ("recommendation", "candidate", *TRAINER_FIELDS) if run.get(name)]
    settings = " ".join([f"m={run['micro_batch_size']}", *named])
    if "error" in run:
        return f"{settings}: {run['error']} ({run.get('message', '')[:200]})"
    peak = (run["peak_reserved_bytes"] or 0) / 2**30
    return f"{settings}: {run['tokens_per_second']:.0f} tokens/s, {peak:.2f} GiB reserved, {run['wall_seconds']:.1f} s"


if __name__ == "__main__":
    raise SystemExit(main())
