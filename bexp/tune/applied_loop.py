"""A loop of accelerate's in a command that runs with an answer: its first loader of data gets the size."""

from __future__ import annotations

import os
from functools import wraps
from types import ModuleType
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from bexp.tune import applied_trainer, promise
from bexp.tune.data_loader import resize, training_loader
from bexp.tune.link import SIZE, STEPS


def patch(module: ModuleType) -> None:
    """Have the next Accelerator that prepares a loader of data train with the answer."""
    loop = _Loop()
    prepare, accumulate = module.Accelerator.prepare, module.Accelerator.accumulate

    @wraps(prepare)
    def prepare_resized(self: Any, *given: Any, **named: Any) -> Any:
        loop.resize(self, training_loader(given))
        return prepare(self, *given, **named)

    @wraps(accumulate)
    def accumulate_noted(self: Any, *models: Any) -> Any:
        loop.begin_micro_step(self)
        return accumulate(self, *models)

    module.Accelerator.prepare, module.Accelerator.accumulate = prepare_resized, accumulate_noted


class _Loop:
    """The Accelerator of the first loader that is prepared, and whether its loop accumulates by `accumulate`."""

    def __init__(self) -> None:
        self._steps = int(os.environ.get(STEPS) or 1)
        self._accelerator: Any = None
        self._accumulates = False

    def resize(self, accelerator: Any, given: DataLoader[Any] | None) -> None:
        """Give a loader the size, if it is the first one and has a size."""
        if given is None or self._accelerator or applied_trainer.is_used.is_set():
            return
        self._accelerator = accelerator
        if given.batch_size is None or isinstance(given.dataset, IterableDataset):
            return
        resize(given, int(os.environ[SIZE]))
        if accelerator.gradient_accumulation_steps > 1:  # else the loop may accumulate without accelerate
            accelerator.gradient_accumulation_steps = self._steps
        promise.takers.append(self.check)

    def begin_micro_step(self, accelerator: Any) -> None:
        """Note that the loop accumulates by `accumulate`, so that its steps can be set even if they were one."""
        if accelerator is self._accelerator and not self._accumulates:
            self._accumulates = True
            accelerator.gradient_accumulation_steps = self._steps

    def check(self, num_micro_steps: int) -> None:
        """Raise if the loop took another number of micro-steps for an optimizer step, so that its batch is another."""
        if not self._accumulates:
            promise.check_steps(num_micro_steps)
