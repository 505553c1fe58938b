"""Lightning's Trainer in a command that runs with an answer: its first training gets the size."""

from __future__ import annotations

import os
from functools import wraps
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any

from torch.utils.data import DataLoader

from bexp.tune import promise
from bexp.tune.data_loader import resize
from bexp.tune.lightning_loop import set_stated_size
from bexp.tune.link import SIZE, STEPS


def patch(module: ModuleType) -> None:
    """Have the first call of `fit` train with the answer."""
    trainer, package = module.Trainer, import_module(module.__name__.removesuffix(".trainer.trainer"))
    loops: Any = import_module(f"{package.__name__}.loops.fit_loop")
    fit, process = trainer.fit, loops._process_dataloader  # the loaders of evaluations go through another module
    chosen: list[Any] = []

    @wraps(fit)
    def fit_with_answer(self: Any, model: Any, *given: Any, **named: Any) -> Any:
        if not chosen:
            chosen.append(self)
            bound = signature(fit).bind(self, model, *given, **named)
            data = [bound.arguments.get(name) for name in ("datamodule", "train_dataloaders")]  # Lightning takes either
            if set_stated_size(package, getattr(model, "_orig_mod", model), *data):
                promise.takers.append(_accumulates)
            self.accumulate_grad_batches = int(os.environ.get(STEPS) or self.accumulate_grad_batches)
            pause = package.callbacks.LambdaCallback(on_train_batch_end=_begin_again, on_validation_end=_begin_again)
            self.callbacks.append(pause)  # the last one, after those that save
        return fit(self, model, *given, **named)

    @wraps(process)
    def process_resized(owner: Any, *given: Any) -> Any:
        return _resized(process(owner, *given)) if owner in chosen else process(owner, *given)

    trainer.fit, loops._process_dataloader = fit_with_answer, process_resized


def _resized(loader: Any) -> Any:
    """Give the answer's size to a loader that Lightning has prepared, if the loader has a size."""
    if isinstance(loader, DataLoader) and loader.batch_size is not None:
        resize(loader, int(os.environ[SIZE]))
        promise.takers.append(_accumulates)
    return loader


def _accumulates(_: int) -> None:
    """Check nothing: Lightning takes as many steps as are set."""


def _begin_again(*_: Any) -> None:
    promise.begin_again()
