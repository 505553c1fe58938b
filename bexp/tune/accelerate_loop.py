"""A loop of accelerate's in a trial: the first loader of data that it prepares gets the size of the trial."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial, wraps
from types import ModuleType
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from bexp.tune.clock import ACCUMULATION
from bexp.tune.compilation import is_compiled
from bexp.tune.data_loader import FIRST_SIZE, SizedLoader, followed, is_shuffled, training_loader
from bexp.tune.lengths import Lengths
from bexp.tune.link import SIZE, CannotSetError, asked, refusing, serving
from bexp.tune.micro_batches import MicroBatches, epoch_of, order_of
from bexp.tune.saving import save_nothing


def patch(module: ModuleType) -> None:
    """Have the next Accelerator that prepares a loader of data prepare one of the trial's size."""
    prepare = module.Accelerator.prepare
    first: list[DataLoader[Any]] = []
    others: list[Any] = []

    @wraps(prepare)
    def prepare_resized(self: Any, *given: Any, **named: Any) -> Any:
        compiles = self.state.dynamo_plugin.backend.value != "NO" or any(map(is_compiled, given))
        training = training_loader(given)
        passed_over = next((each for each in given if isinstance(each, DataLoader)), None)
        if training is None and passed_over is not None:
            followed.other_size = followed.other_size or passed_over.batch_size
        with refusing():
            replaced = [
                _resized(self, each, first, is_compiled=compiles) if each is training else each for each in given
            ]
        if training is not None:
            save_nothing()
        loaders = [each.loader if isinstance(each, SizedLoader) else each for each in replaced]
        prepared = prepare(self, *loaders, **named)
        for each, sized in zip(prepared if len(given) > 1 else (prepared,), replaced, strict=True):
            if isinstance(sized, SizedLoader):
                _follow(each, sized, others)
            elif is_shuffled(sized):
                others.append(each)
        return prepared

    module.Accelerator.prepare = prepare_resized
    for name in ("save", "save_model", "save_state", "init_trackers", "log", "end_training"):
        setattr(module.Accelerator, name, lambda *_, **__: None)


def _resized(accelerator: Any, given: Any, first: list[DataLoader[Any]], *, is_compiled: bool) -> Any:
    """Return a loader of the trial's size for the first loader of a training; anything else as it is.

    `first` receives the first loader. If its size cannot be set, the command must state the size: no other loader takes
    its place. A compiled model gets one size in each process. With a second size it would be compiled for any size.
    """
    if not isinstance(given, DataLoader) or first or asked or serving:
        return given
    first.append(given)
    if given.batch_size is None or isinstance(given.dataset, IterableDataset):
        if SIZE in os.environ:
            return given
        what = "has a sampler of whole batches" if given.batch_size is None else "reads a stream"
        raise CannotSetError(f"the first loader of data {what}: put {{micro_batch_size}} where the command takes it")
    if accelerator.split_batches and accelerator.num_processes > 1:
        raise CannotSetError(
            "with split_batches the size is that of all processes: put {micro_batch_size} where the command takes it"
        )
    lengths = Lengths.of(given.dataset)
    asked.update(
        kind="accelerate's loop",
        micro_batch_size=given.batch_size,
        grad_accum_steps=accelerator.gradient_accumulation_steps,
        lengths=lengths.describe(),
    )
    own_steps = accelerator.gradient_accumulation_steps

    def accumulate(steps: int) -> None:
        accelerator.gradient_accumulation_steps = asked["given_steps"] = min(ACCUMULATION, own_steps, steps)

    accumulate(ACCUMULATION)
    epoch, number, rank = epoch_of(given.sampler, lengths), accelerator.num_processes, accelerator.process_index

    def order(size: int) -> tuple[Any, MicroBatches | None]:
        if not lengths.is_known:
            return given.sampler, None
        return order_of(given.sampler, epoch, lengths, size, processes=number, rank=rank)

    is_set_once = number > 1 or is_compiled
    initial = given.batch_size if is_set_once else min(FIRST_SIZE, given.batch_size)
    sized = SizedLoader(given, int(os.environ.get(SIZE) or initial), lengths, order, accumulate)
    followed.sized = None if is_set_once else sized
    return sized


def _follow(prepared: Any, sized: SizedLoader, others: Sequence[Any]) -> None:
    """Note each micro-batch of a prepared loader when the loop takes it, because the loader itself is one ahead.

    `others` are prepared loaders that an evaluation does not read.
    """
    followed.is_needed = True
    own = type(prepared)
    iterate = own.__iter__

    @wraps(iterate)
    def iterate_followed(self: Any) -> Any:
        if self is prepared:
            return followed.follow(partial(iterate, self), sized)
        return followed.watch(iterate(self)) if any(self is other for other in others) else iterate(self)

    own.__iter__ = iterate_followed  # Python looks for it in the class, and this one cannot be changed for one object
