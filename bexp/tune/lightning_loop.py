"""Lightning's Trainer in a trial: its data loader gets the size of the trial, and nothing is written."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from bexp.tune.clock import ACCUMULATION
from bexp.tune.compilation import is_compiled
from bexp.tune.data_loader import FIRST_SIZE, SizedLoader, follow, followed, with_sampler
from bexp.tune.lengths import Lengths, WorstFirst
from bexp.tune.link import SCRATCH, SIZE, CannotSetError, asked, refusing, switch_off
from bexp.tune.micro_batches import MicroBatches, epoch_of, order_of
from bexp.tune.reply import describe_parameters
from bexp.tune.saving import save_nothing

_LEFT_OUT = {
    "Checkpoint",
    "ProgressBar",
    "ModelSummary",
    "SaveConfigCallback",
    "EarlyStopping",
    "Timer",
    "BatchSizeFinder",
    "LearningRateFinder",
}
"""Callbacks that write, end a training, or run another one. Each of Lightning's two packages has its own."""
_SCHEDULED = "GradientAccumulationScheduler"


def patch(module: ModuleType) -> None:
    """Have every Trainer measure from now on in place of training."""
    trainer, package = module.Trainer, module.__name__.removesuffix(".trainer.trainer")
    fit = trainer.fit

    @wraps(fit)
    def measure(self: Any, model: Any, *given: Any, **named: Any) -> None:
        bound = signature(fit).bind(self, model, *given, **named)
        bound.arguments["ckpt_path"] = None
        data = [bound.arguments.get(name) for name in ("datamodule", "train_dataloaders")]
        own = getattr(model, "_orig_mod", model)
        _prepare(self, own, data, import_module(package), is_compiled=is_compiled(model))
        fit(*bound.args, **bound.kwargs)
        os._exit(0)  # the command's code for its end is not for a trial

    trainer.fit = measure
    for name in ("validate", "test", "predict", "save_checkpoint"):
        setattr(trainer, name, wraps(getattr(trainer, name))(lambda *_, **__: []))


def _prepare(trainer: Any, model: Any, data: list[Any], package: Any, *, is_compiled: bool) -> None:
    """Switch off all but a training's steps, and have its loader resized as soon as it is made."""
    save_nothing()
    configure = model.configure_callbacks
    model.configure_callbacks = lambda: _kept(configure())
    trainer.callbacks = [*_kept(trainer.callbacks), package.callbacks.LambdaCallback(on_train_start=_never_end)]
    scratch = trainer._default_root_dir = os.environ[SCRATCH]
    if trainer.loggers:  # the command's own calls need one
        dummy = import_module(f"{package.__name__}.loggers.logger").DummyLogger
        trainer.loggers = [type("Silent", (dummy,), {"save_dir": scratch, "log_dir": scratch})()]
    trainer.profiler = package.profilers.PassThroughProfiler()
    trainer.limit_train_batches, trainer.limit_val_batches, trainer.num_sanity_val_steps = 1.0, 0, 0
    trainer.reload_dataloaders_every_n_epochs = 0
    stated = set_stated_size(package, model, *data)
    process = trainer.strategy.process_dataloader  # called after Lightning's own changes to a loader

    def process_resized(loader: Any) -> Any:
        with refusing():
            return process(_resized(trainer, loader, stated, is_compiled=is_compiled))

    trainer.strategy.process_dataloader = process_resized


def set_stated_size(package: Any, *owners: Any) -> int | None:
    """Set the `batch_size` of modules, if they have one, to the trial's; return what it was."""
    modules = [each for each in owners if isinstance(each, package.LightningModule | package.LightningDataModule)]
    fields = [field for owner in modules for field in (owner, owner.hparams) if _size_of(field) is not None]
    stated = _size_of(fields[0]) if fields else None
    if SIZE in os.environ:
        for field in fields:
            with suppress(AttributeError):  # a property
                field.batch_size = int(os.environ[SIZE])
    return stated


def _size_of(field: Any) -> int | None:
    size = getattr(field, "batch_size", None)
    return size if isinstance(size, int) else None


def _kept(callbacks: Any) -> list[Any]:
    """Callbacks without those that are not for a trial."""
    given = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    left_out = [each for each in given if _LEFT_OUT & {kind.__name__ for kind in type(each).__mro__}]
    for each in left_out:
        switch_off(type(each).__name__)
    return [each for each in given if each not in left_out]


def _never_end(trainer: Any, _: Any) -> None:
    """Leave the end to the trial. Until now the command's limits stood, because learning rate schedules read them."""
    trainer.fit_loop.max_epochs = trainer.fit_loop.epoch_loop.max_steps = 1 << 30
    for schedule in trainer.lr_scheduler_configs:  # one that has all its steps behind it would raise
        schedule.frequency = 1 << 30


def _resized(trainer: Any, loader: Any, stated: int | None, *, is_compiled: bool = False) -> Any:
    """Return a loader of the trial's size, or the loader itself if the size stands in the command."""
    os.environ["RANK"] = str(trainer.global_rank)  # Lightning starts processes without it
    size = _size_of(loader) if isinstance(loader, DataLoader) else None
    why = _why_not(trainer, size or stated)
    if why is not None:
        if SIZE in os.environ:
            return loader
        raise CannotSetError(
            f"the micro-batch of this training cannot be set, because {why}: put {{micro_batch_size}} where "
            "the command takes it"
        )
    lengths = Lengths.of(getattr(loader, "dataset", None))
    asked.update(
        describe_parameters(list(trainer.lightning_module.parameters())),
        kind="Lightning's Trainer",
        micro_batch_size=size or stated,
        grad_accum_steps=trainer.accumulate_grad_batches,
        num_steps=_num_steps(trainer, loader),
        lengths=lengths.describe(),
    )

    def accumulate(steps: int) -> None:
        trainer.accumulate_grad_batches = asked["given_steps"] = min(ACCUMULATION, steps)

    accumulate(ACCUMULATION)
    if size is None:
        return loader
    if isinstance(loader.dataset, IterableDataset):
        return with_sampler(loader, int(os.environ.get(SIZE) or size), None)
    is_set_once = stated is not None or is_compiled or trainer.world_size > 1  # compiled for one size, not for any
    first = size if is_set_once else min(FIRST_SIZE, size)
    sized = _rebuilt(loader, int(os.environ.get(SIZE) or first), lengths, accumulate)
    followed.sized = None if is_set_once else sized
    return follow(sized)


def _num_steps(trainer: Any, loader: Any) -> int | None:
    """Return the optimizer steps of the command's own run; None if its end is not known."""
    limits = [trainer.max_steps] if trainer.max_steps >= 0 else []
    if (trainer.max_epochs or -1) > 0:
        with suppress(TypeError):  # a stream has no length
            limits.append(trainer.max_epochs * math.ceil(len(loader) / trainer.accumulate_grad_batches))
    return min(limits, default=0) or None


def _why_not(trainer: Any, size: int | None) -> str | None:
    """Return why the size and the accumulation cannot be set; None if they can."""
    if not trainer.lightning_module.automatic_optimization:
        return "it steps its optimizers by hand"
    if any(_SCHEDULED in {kind.__name__ for kind in type(each).__mro__} for each in trainer.callbacks):
        return f"its accumulation changes by a {_SCHEDULED}"
    if asked:
        return "it draws from several loaders of data"
    if size is None:
        return "its loader of data has no batch_size, nor has its module"
    return None


def _rebuilt(loader: DataLoader[Any], size: int, lengths: Lengths, accumulate: Callable[[int], None]) -> SizedLoader:
    """Return a loader of this size with the longest samples first. It does not end, so all micro-batches are full."""
    sampler: Any = loader.sampler

    def order(size: int) -> tuple[Any, MicroBatches | None]:
        if not lengths.is_known:
            return WorstFirst(lengths, size, sampler, longest_at=()), None
        return order_of(sampler, epoch_of(sampler, lengths), lengths, size)

    return SizedLoader(loader, size, lengths, order, accumulate)
