"""`python -P -m bexp.targets.process` measures one target. A profiler starts it; nobody starts it by hand.

It reads one JSON object a line from standard input, and answers each with one line on the standard output that it was
started with. What the target itself prints goes to standard error. It imports `bexp`, the target and its folder.

    {"command": "open", "reference": "/home/me/train.py:Target", "config": {...}, "device": "cuda:0",
     "optimizer": "adamw", "seed": 0, "memory_limit_bytes": ..., "context_bytes": ...}
    {"command": "describe"}
    {"command": "measure", "micro_batch_size": 4}
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import os
import queue
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bexp.error_place import first_line, place_of
from bexp.measure import host_limits
from bexp.measure.heap_holes import run_without_holes
from bexp.measure.memory_meters import byte_meter
from bexp.measure.step_checks import BatchShapes, StepError, check_gradients, is_finite, shapes_of
from bexp.measure.timestamps import Mark, mark_of, synchronize
from bexp.measure.timing import TimingBudget, collector_paused, standard_error
from bexp.out_of_memory import is_out_of_memory


class Served:
    """The target of this process, with one method for each command."""

    def __init__(self) -> None:
        self._run: TargetRun | None = None

    def open(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Load the target and build its model."""
        device = torch.device(command["device"])
        _limit_memory(device, int(command["memory_limit_bytes"]), int(command["context_bytes"]))
        target = load_target(command["reference"])
        dimensions = {name: list(values) for name, values in getattr(target, "dimensions", {}).items()}
        chosen = command["choice"] or {name: values[0] for name, values in dimensions.items()}
        torch.manual_seed(command["seed"])
        self._run = TargetRun(target, {**command["config"], **chosen}, device, command["optimizer"])
        return {"dimensions": dimensions}

    def describe(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the search must know of the model."""
        assert self._run is not None, "open comes first"
        return self._within_memory(self._run.describe)

    def measure(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Return seconds and bytes at one micro-batch size."""
        assert self._run is not None, "open comes first"
        return self._within_memory(partial(self._run.measure, int(command["micro_batch_size"])))

    def _within_memory(self, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        assert self._run is not None, "open comes first"
        return run_without_holes(run) if self._run.device.type == "cpu" else run()


def answer(handle: Callable[[Mapping[str, Any]], dict[str, Any]], command: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reply to one command: `outcome` ok with the result, else an outcome with its reason."""
    try:
        return {"outcome": "ok", **handle(command)}
    except (TargetError, NotImplementedError) as error:
        return {"outcome": "unsupported", "reason": first_line(error)}
    except StepError as error:
        return {"outcome": "crashed", "reason": first_line(error)}
    except (torch.OutOfMemoryError, MemoryError) as error:
        return {"outcome": "out_of_memory", "reason": first_line(error)}
    except Exception as error:  # noqa: BLE001 - the target is the caller's, and any failure of it is an outcome
        traceback.print_exc()
        reason = f"{type(error).__name__}: {first_line(error)}{place_of(error)}"
        return {"outcome": "out_of_memory" if is_out_of_memory(error) else "crashed", "reason": reason}


def main() -> int:
    """Answer commands until standard input ends."""
    with _private_output() as replies:
        commands = _read_commands()
        cores = host_limits.usable_cores()
        torch.set_num_threads(max(1, min(torch.get_num_threads(), cores)))
        served = Served()
        while (line := commands.get()) is not None:
            command = json.loads(line)
            handle = {"open": served.open, "describe": served.describe, "measure": served.measure}[command["command"]]
            replies.write(json.dumps(answer(handle, command)) + "\n")
            replies.flush()
    return 0


def _read_commands() -> queue.SimpleQueue[bytes | None]:
    """Read commands in a thread, which ends the process with its parent, also in the middle of a step."""
    commands: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    lines = os.fdopen(os.dup(0), "rb")
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)  # a target that reads standard input takes no commands away
    os.close(devnull)

    def read() -> None:
        for line in lines:
            commands.put(line)
        os._exit(0)

    threading.Thread(target=read, name="commands", daemon=True).start()
    return commands


def _private_output() -> IO[str]:
    """The standard output that this process was started with; later prints go to standard error."""
    sys.stdout.flush()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _limit_memory(device: torch.device, limit_bytes: int, context_bytes: int) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
        total = torch.cuda.get_device_properties(device).total_memory
        # The profiler that started this process has a context on the device, too.
        share = max(1.0, limit_bytes - 2 * context_bytes) / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)
    else:
        host_limits.limit_data(limit_bytes)


MICRO_STEPS = 2
WARM_UP_STEPS = 2
BUDGET = TimingBudget(min_repeats=4, max_repeats=12, seconds=3.0)
LONG_STEP_SECONDS = 5.0
"""A longer step is timed in two repeats at most: variation is a small part of it."""


class TargetRun:
    """A target with its model and optimizer on a device. The optimizer's steps have size zero.

    Args:
        target: an object as `bexp.targets.Target` describes it.
        config: the argument of `build`.
        device: where the model is built.
        optimizer: `adamw` or `sgd`, if the target has no optimizer of its own.
    """

    def __init__(self, target: Any, config: Mapping[str, Any], device: torch.device, optimizer: str) -> None:
        self._target = target
        self.device = device
        self._mark: Callable[[], Mark] = mark_of(device)
        model = target.build(config, device)
        if not isinstance(model, nn.Module):
            raise TargetError(f"build returned {type(model).__name__}, not an nn.Module")
        self.model = model.train()
        self._trained = [p for p in self.model.parameters() if p.requires_grad]
        if not self._trained:
            raise TargetError("build returned a model without trained parameters")
        self._shapes = [p.shape for p in self.model.parameters()]
        self._batch_shapes = BatchShapes()
        self._optimizer = self._open_optimizer(optimizer)

    def describe(self) -> dict[str, Any]:
        """Return what the search must know of the model.

        `saved_bytes` is what a further sequence adds to the peak of a step, from steps with one and with two.

        Raises:
            StepError: the step makes no gradients, or batch ignores its size; or what `measure` raises.
        """
        parameters = list(self.model.parameters())
        self._check_backward()
        first = self._peak_bytes(1)
        try:
            saved = max(0, self._peak_bytes(2) - first)
        except torch.OutOfMemoryError:
            saved = first
            self._drop_gradients()
        return {
            "class_name": type(self.model).__name__,
            "seq_length": int(getattr(self._target, "seq_length", 1)),
            "dtype": str(max(parameters, key=lambda p: p.numel()).dtype).removeprefix("torch."),
            "num_parameters": sum(p.numel() for p in parameters),
            "parameter_bytes": sum(p.nbytes for p in parameters),
            "trainable_bytes": sum(p.nbytes for p in self._trained),
            "saved_bytes": saved,
        }

    def measure(self, micro_batch_size: int) -> dict[str, Any]:
        """Return seconds of a micro-step and of the optimizer, and the peak bytes of a step.

        Raises:
            StepError: the loss is not finite, or batch or step change shapes, or batch has not that many sequences.
        """
        peak = self._peak_bytes(micro_batch_size)
        batches = self._batches(micro_batch_size)
        for _ in range(WARM_UP_STEPS):
            self._run_step(batches)
        synchronize(self.device)
        micro_steps: list[float] = []
        optimizer: list[float] = []
        begun = time.perf_counter()
        with collector_paused():
            while not BUDGET.is_spent(micro_steps, time.perf_counter() - begun):
                marks = self._run_step(batches)
                synchronize(self.device)
                seconds = [start.seconds_until(end) for start, end in itertools.pairwise(marks)]
                micro_steps.append(seconds[1])  # the first begins on an idle device
                optimizer.append(seconds[-1])
                if len(micro_steps) > 1 and seconds[1] > LONG_STEP_SECONDS:
                    break
        cuda = self.device.type == "cuda"
        return {
            "micro_step_seconds": statistics.median(micro_steps),
            "optimizer_seconds": statistics.median(optimizer),
            "standard_error_seconds": standard_error(micro_steps),
            "repeats": len(micro_steps),
            "peak_bytes": peak,
            "reserved_bytes": torch.cuda.max_memory_reserved(self.device) if cuda else peak,
        }

    def _open_optimizer(self, name: str) -> torch.optim.Optimizer:
        own = getattr(self._target, "optimizer", None)
        optimizer: torch.optim.Optimizer
        if own is not None:
            optimizer = own(self.model)
        elif name == "sgd":
            optimizer = torch.optim.SGD(self._trained, momentum=0.9, fused=True)
        else:
            optimizer = torch.optim.AdamW(self._trained, fused=True)
        for group in optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        return optimizer

    def _batches(self, micro_batch_size: int) -> list[Any]:
        """The micro-batches of a step. They have the same shapes unless the target says which is the worst."""
        batches = [self._target.batch(micro_batch_size, self.device) for _ in range(MICRO_STEPS)]
        lengths_vary = hasattr(self._target, "worst_batch")
        if not lengths_vary and len({str(shapes_of(batch)) for batch in batches}) > 1:
            raise StepError(
                f"batch({micro_batch_size}) returns other shapes each time; a target whose lengths vary has worst_batch"
            )
        self._batch_shapes.check(micro_batch_size, batches[0], lengths_vary=lengths_vary)
        return batches

    def _peak_bytes(self, micro_batch_size: int) -> int:
        """The most bytes that a step holds, with the optimizer's state, after a first step has made that state."""
        worst = getattr(self._target, "worst_batch", None)
        if worst is None:
            batches = self._batches(micro_batch_size)
        else:
            batches = [worst(micro_batch_size, self.device) for _ in range(MICRO_STEPS)]
        losses: list[Any] = []
        self._run_step(batches[:1], losses)
        self._check(losses, micro_batch_size)
        losses.clear()
        existing = self._existing()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        with byte_meter(self.device, existing) as meter:
            meter.reset_peak()
            self._run_step(batches, losses)
            synchronize(self.device)
            counted = meter.peak()
        self._check(losses, micro_batch_size)
        return counted if self.device.type == "cuda" else counted + _bytes_of(existing)

    def _existing(self) -> list[Tensor]:
        """Parameters, buffers and the optimizer's state; there are no gradients between two steps."""
        states = (leaf for leaf in tree_leaves(list(self._optimizer.state.values())) if isinstance(leaf, Tensor))
        return [*self.model.parameters(), *self.model.buffers(), *states]

    def _run_step(self, batches: list[Any], losses: list[Any] | None = None) -> list[Mark]:
        """One micro-step for each batch, then the optimizer; returns the moments before, between and after."""
        marks = [self._mark()]
        for batch in batches:
            loss = self._target.step(self.model, batch)
            if losses is not None:
                losses.append(loss.detach() if isinstance(loss, Tensor) else loss)
            del loss
            marks.append(self._mark())
        self._optimizer.step()
        self._drop_gradients()
        return [*marks, self._mark()]

    def _check_backward(self) -> None:
        batch = self._target.batch(1, self.device)
        loss = self._target.step(self.model, batch)
        self._check([loss.detach() if isinstance(loss, Tensor) else loss], 1)
        del loss
        check_gradients(self._trained, lambda: self._target.step(self.model, batch))
        self._drop_gradients()

    def _check(self, losses: list[Any], micro_batch_size: int) -> None:
        for loss in losses:
            if not is_finite(loss):
                raise StepError(f"the loss is not finite at micro-batch size {micro_batch_size}")
        if [p.shape for p in self.model.parameters()] != self._shapes:
            raise StepError("the step changes the shapes of the model's parameters")

    def _drop_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        for parameter in self._trained:  # also those that the optimizer does not have
            parameter.grad = None


def _bytes_of(tensors: list[Tensor]) -> int:
    storages = {id(storage): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())


METHODS = ("build", "batch", "step")
MOST_NAMED = 10
"""The most classes of a module that a message names."""


class TargetError(Exception):
    """A target that cannot be used as one; the message says why."""


def load_target(reference: str) -> Any:
    """Return the target that `reference` names: `/path/train.py:Target` or `package.module:Target`.

    A class is called without arguments. The folder of a file is the first that imports are looked up in, as when the
    file is run.

    Raises:
        TargetError: there is no such file, module or name in it, or it lacks a method.
        Exception: whatever the import raises.
    """
    place, _, name = reference.rpartition(":")
    module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    named: Any = module
    for part in name.split("."):
        named = getattr(named, part, None)
        if named is None:
            raise TargetError(f"{place} has no '{name}'{_classes_of(module)}")
    target = named() if isinstance(named, type) else named
    missing = [method for method in METHODS if not callable(getattr(target, method, None))]
    if missing:
        raise TargetError(f"'{name}' has no method {', '.join(missing)}")
    return target


def _classes_of(module: ModuleType) -> str:
    """The classes that a module defines itself, as an addition to a message."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    classes = [name for name in own if isinstance(vars(module)[name], type)]
    return f"; its classes are {', '.join(classes[:MOST_NAMED])}" if classes else ""


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"there is no file {path}")
    sys.path.insert(0, str(path.parent))
    name = path.stem if path.stem not in sys.modules else f"target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a file that ends with .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs, as an import does: dataclasses look their module up
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    raise SystemExit(main())
