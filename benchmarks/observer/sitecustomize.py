"""Observes a training of transformers' Trainer or its children from within, for `benchmarks.published_inputs`.

With this folder in PYTHONPATH, each Python process of a command loads it. Once the command imports the Trainer, the
first optimizer steps are timed and counted, the figures are written to the file in OBSERVED, and the process ends. It
knows nothing of bexp, and is off in its trials.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
import time
from collections import Counter
from typing import Any

WARM_UP = int(os.environ.get("OBSERVED_WARM_UP", "5"))
TIMED = int(os.environ.get("OBSERVED_STEPS", "20"))
HOST_LOOP = 50_000
"""The numbers that the fixed loop sums."""
LEAST_SECONDS = 10.0
"""Steps are timed for so long at least: the pace of a host varies for seconds at a time."""


class Samples:
    """A sampler of batches that notes how many samples each has."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.drawn: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Any:
        for batch in self.sampler:
            self.drawn.append(len(batch))
            yield batch


class Training:
    """What the first optimizer steps of a training did."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.micro_steps: list[dict[str, Any]] = []
        self.products: Counter[str] = Counter()
        self.samples: Samples | None = None
        self.began = self.away = self.issued = 0.0
        self.model: dict[str, Any] = {}

    def now(self) -> float:
        """Seconds, once the device has done its work."""
        import torch  # noqa: PLC0415 - the command imports it when it likes

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def begin(self, args: Any, model: Any, optimizer: Any, loader: Any) -> None:
        """Describe a training that begins."""
        import torch  # noqa: PLC0415 - likewise

        linear = next((each for each in model.modules() if isinstance(each, torch.nn.Linear)), None)
        if linear is not None:
            linear.register_forward_hook(lambda _, __, output: self.products.update([str(output.dtype)[6:]]))
        source = getattr(loader, "base_dataloader", loader)
        if getattr(source, "batch_sampler", None) is not None:
            self.samples = source.__dict__["batch_sampler"] = Samples(source.batch_sampler)
        parameters = list(model.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self.model = {
            "class_name": type(model).__name__,
            "optimizer": str(args.optim.value if hasattr(args.optim, "value") else args.optim),
            "optimizer_class": type(getattr(optimizer, "optimizer", optimizer)).__name__,
            "gradient_checkpointing": bool(args.gradient_checkpointing),
            "attention": getattr(getattr(model, "config", None), "_attn_implementation", None),
            "per_device_train_batch_size": args.per_device_train_batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "num_trained": sum(each.numel() for each in trained),
            "trained_bytes": _bytes_by_dtype(trained),
            "parameter_bytes": _bytes_by_dtype(parameters),
        }
        self.began = self.now()
        self.reset_peak()

    def reset_peak(self) -> None:
        """Forget the memory of what is no step."""
        import torch  # noqa: PLC0415 - likewise

        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def end_step(self) -> bool:
        """Note a step, and return whether there were enough. `issued` are the host's seconds of its micro-steps."""
        import torch  # noqa: PLC0415 - likewise

        now = self.now()
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
        figures: dict[str, Any] = {"seconds": now - self.began - self.away, "peak_bytes": peak, "issued": self.issued}
        self.steps.append(figures | self._micro_steps() | self._conditions())
        self.away, self.issued, self.micro_steps = 0.0, 0.0, []
        timed = [step["seconds"] for step in self.steps[WARM_UP:]]
        enough = len(timed) >= TIMED and sum(timed) >= LEAST_SECONDS
        if enough:
            self.write()
        self.began = self.now()
        return enough

    def _conditions(self) -> dict[str, Any]:
        """Return the device's clock, power and temperature, and the seconds of a fixed loop on the host."""
        import torch  # noqa: PLC0415 - likewise

        begun = time.perf_counter()
        sum(range(HOST_LOOP))
        found: dict[str, Any] = {"host_loop_seconds": time.perf_counter() - begun}
        if torch.cuda.is_available() and importlib.util.find_spec("pynvml") is not None:
            found |= {"sm_clock_mhz": torch.cuda.clock_rate(), "power_watts": torch.cuda.power_draw() / 1e3}
            found["temperature_celsius"] = torch.cuda.temperature()
        return found

    def _micro_steps(self) -> dict[str, Any]:
        before = sum(int(step["micro_steps"]) for step in self.steps)
        number = len(self.micro_steps)
        drawn = None if self.samples is None else sum(self.samples.drawn[before : before + number])
        tokens = sum(int(each["tokens"]) for each in self.micro_steps)
        shapes = sorted({tuple(each["shape"]) for each in self.micro_steps})
        return {"micro_steps": number, "samples": drawn, "tokens": tokens, "shapes": shapes}

    def write(self) -> None:
        """Write the figures of all steps, and those of the timed ones together."""
        timed = self.steps[WARM_UP:]
        seconds = sum(step["seconds"] for step in timed)
        peaks = [step["peak_bytes"] for step in self.steps if step["peak_bytes"] is not None]
        counted = {
            name: Counter(step[name] for step in self.steps).most_common(1)[0][0] for name in ("micro_steps", "samples")
        }
        found = {
            **self.model,
            "products": self.products.most_common(),
            "micro_steps_of_a_step": counted["micro_steps"],
            "samples_of_a_step": counted["samples"],
            "peak_bytes": max(peaks, default=None),
            "tokens_per_second": sum(step["tokens"] for step in timed) / seconds,
            "samples_per_second": sum(step["samples"] or 0 for step in timed) / seconds,
            "timed_steps": len(timed),
            "is_with_bexp": "bexp" in sys.modules,
            "steps": self.steps,
        }
        with open(os.environ["OBSERVED"], "w") as file:  # noqa: PTH123 - light: every process loads this
            json.dump(found, file)


def _bytes_by_dtype(parameters: list[Any]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for each in parameters:
        found[str(each.dtype)[6:]] += each.numel() * each.element_size()
    return dict(found)


def observe(module: Any) -> None:
    """Have each Trainer that is made from now on be observed."""
    import torch  # noqa: PLC0415 - transformers has imported it
    from transformers import training_args  # noqa: PLC0415 - likewise

    if not torch.cuda.is_available():
        setattr(training_args, "is_torch_bf16_gpu_available", lambda: True)  # noqa: B010 - a CPU has bfloat16 as well
    training = Training()
    trainer = module.Trainer
    init, micro_step = trainer.__init__, trainer.training_step

    class Watch(module.TrainerCallback):
        """Notes the ends of steps."""

        def on_train_begin(self, args: Any, *_: Any, **named: Any) -> None:
            """The training begins."""
            training.begin(args, named["model"], named["optimizer"], named["train_dataloader"])

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """The optimizer has stepped."""
            if training.end_step():
                sys.stdout.flush()
                os._exit(0)

        def on_train_end(self, *_: Any, **__: Any) -> None:
            """A training that is shorter than the least seconds has ended."""
            if len(training.steps) >= WARM_UP + TIMED:
                training.write()

    @functools.wraps(init)  # Axolotl reads the source
    def make(self: Any, *given: Any, **named: Any) -> None:
        init(self, *given, **named)
        self.add_callback(Watch())

    @functools.wraps(micro_step)  # Axolotl reads the source
    def step(self: Any, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        masks = [value for name, value in inputs.items() if name.endswith("attention_mask") and value.dim() == 2]
        ids = [value for name, value in inputs.items() if name.endswith("input_ids")]
        tokens = sum((mask != 0).sum() for mask in masks) if masks else sum(each.numel() for each in ids)
        training.micro_steps.append({"tokens": tokens, "shape": [tuple(each.shape) for each in ids]})
        began = time.perf_counter()
        loss = micro_step(self, model, inputs, *given, **named)
        training.issued += time.perf_counter() - began
        return loss

    def elsewhere(work: Any) -> Any:
        @functools.wraps(work)
        def timed(self: Any, *given: Any, **named: Any) -> Any:
            began = training.now()
            try:
                return work(self, *given, **named)
            finally:
                training.away += training.now() - began
                training.reset_peak()

        return timed

    trainer.__init__, trainer.training_step = make, step
    trainer.evaluate, trainer._save_checkpoint = elsewhere(trainer.evaluate), elsewhere(trainer._save_checkpoint)


class OnImport:
    """Calls `observe` with transformers' module of the Trainer, once that is imported."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        """Find the module as ever, and add to its execution."""
        if name != "transformers.trainer":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def executed(module: Any) -> None:
            execute(module)
            observe(module)

        spec.loader.exec_module = executed  # type: ignore[method-assign]  # this import alone
        return spec


if "OBSERVED" in os.environ and "BEXP_TUNE_SOCKET" not in os.environ:
    sys.meta_path.insert(0, OnImport())
