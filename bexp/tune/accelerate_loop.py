"""A loop of accelerate's in a trial: the first loader of data that it prepares gets the size of the trial."""

from __future__ import annotations

import os
from functools import wraps
from types import ModuleType
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from bexp.tune.lengths import Lengths, WorstFirst
from bexp.tune.link import SIZE
from bexp.tune.measuring import ACCUMULATION, serving
from bexp.tune.own_loop import asked


def patch(module: ModuleType) -> None:
    """Have the next Accelerator that prepares a loader of data prepare one of the trial's size."""
    prepare = module.Accelerator.prepare

    @wraps(prepare)
    def prepare_resized(self: Any, *given: Any, **named: Any) -> Any:
        return prepare(self, *(_resized(self, each) for each in given), **named)

    module.Accelerator.prepare = prepare_resized
    for name in ("save", "save_model", "save_state", "init_trackers", "log", "end_training"):
        setattr(module.Accelerator, name, lambda *_, **__: None)


def _resized(accelerator: Any, given: Any) -> Any:
    """Return a loader of the trial's size for the first loader of a training; anything else as it is."""
    is_loader = isinstance(given, DataLoader) and given.batch_size is not None
    if not is_loader or asked or serving or isinstance(given.dataset, IterableDataset):
        return given
    lengths = Lengths.of(given.dataset)
    asked.update(
        kind="accelerate's loop",
        micro_batch_size=given.batch_size,
        grad_accum_steps=accelerator.gradient_accumulation_steps,
        lengths=lengths.describe(),
    )
    accelerator.gradient_accumulation_steps = min(ACCUMULATION, accelerator.gradient_accumulation_steps)
    size = int(os.environ.get(SIZE) or given.batch_size)
    worst = WorstFirst(lengths, size * accelerator.num_processes, given.sampler) if lengths.is_known else None
    return DataLoader(
        given.dataset,
        batch_size=size,
        sampler=worst or given.sampler,
        collate_fn=given.collate_fn,
        num_workers=given.num_workers,
        pin_memory=given.pin_memory,
        drop_last=given.drop_last,
        worker_init_fn=given.worker_init_fn,
        persistent_workers=given.persistent_workers,
        prefetch_factor=given.prefetch_factor,
    )
