"""Data loaders of loops without a Trainer: the longest micro-batch comes first, and each micro-batch is known."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial, wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bexp.tune.link import SIZE, STEPS, CannotSetError, asked, serving
from bexp.tune.promise import now, size_in_braces

if TYPE_CHECKING:  # this module is loaded while torch itself is
    from torch.utils.data import DataLoader

    from bexp.tune.lengths import Lengths
    from bexp.tune.micro_batches import MicroBatches

_OURS = "_bexp_loader"
FIRST_SIZE = 2
"""The size of the one step before a trial names a size: small enough to fit, large enough for batch normalisation."""


Ordered = Callable[[int], "tuple[Any, MicroBatches | None]"]
"""Makes the order of a size: a sampler, and its micro-batches if they are known and vary."""


class SizedLoader:
    """A training's data loader, made anew with a size and an order of its own, which can change between two steps."""

    def __init__(
        self,
        loader: DataLoader[Any],
        size: int,
        lengths: Lengths,
        order: Ordered,
        accumulate: Callable[[int], None] | None = None,
    ) -> None:
        self.lengths, self.size = lengths, size
        self._order, self._accumulate = order, accumulate
        sampler, self.micro_batches = order(size)
        self.loader = with_sampler(loader, size, sampler)
        self._batches: Any = self.loader.batch_sampler  # accelerate's own loader takes it over
        self.turn = 0
        """How often the size was set; each time the order begins anew."""

    def set(self, size: int, accumulation: int | None) -> None:
        """Begin anew with micro-batches of another size, in so many accumulation steps if a trial can set them."""
        if accumulation is not None and self._accumulate is not None:
            self._accumulate(accumulation)
        self._batches.sampler, self.micro_batches = self._order(size)
        self._batches.batch_size = self.size = size
        self.turn += 1


@dataclass
class Followed:
    """The micro-batch that the loop has taken last."""

    sized: SizedLoader | None = None
    """Its loader, if the size of that can be set."""
    lengths: Lengths | None = None
    """Of the samples, if they are known."""
    micro_batches: MicroBatches | None = None
    """Those of the loader's size, if they are known and vary."""
    number: int | None = None
    """Of the micro-batch in its epoch."""
    positions: int | None = None
    """Tokens that are computed for the micro-batch, padding included."""
    other_size: int | None = None
    """That of the first loader which was prepared with another size than the one in braces."""
    is_needed: bool = False
    """Whether the training must read the loader whose size was set."""
    is_read: bool = False
    has_others: bool = False
    """Whether the training has read that loader, and another one that is shuffled, as no evaluation's is."""
    early: list[tuple[float, int, int | None]] | None = field(default_factory=list)
    """Of each micro-batch before the first optimizer step: when it was taken, its number, its positions. Later None."""

    def early_steps(self) -> list[tuple[float, int, int | None]]:
        """Return seconds, number and positions of each micro-step until now; nothing at a second call."""
        early, self.early = self.early or [], None
        ends = [*(taken for taken, *_ in early[1:]), *([now()] if early else [])]
        return [(end - taken, number, width) for (taken, number, width), end in zip(early, ends, strict=True)]

    def check(self) -> None:
        """Raise CannotSetError if the first optimizer step has shown that its batch is not that of the sized loader."""
        if not self.is_needed or SIZE in os.environ:
            return
        if self.has_others or not self.is_read:
            what = "reads several loaders in a step" if self.is_read else "does not read the first prepared loader"
            raise CannotSetError(f"the training {what}: put {{micro_batch_size}} where the command takes it")

    def watch(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of another shuffled loader, and note if they come before the first optimizer step."""
        for batch in batches:
            self.has_others = self.has_others or self.early is not None
            yield batch

    def follow(self, iterate: Callable[[], Iterable[Any]], sized: SizedLoader) -> Iterator[Any]:
        """Yield and note the batches of one epoch, which begins anew whenever a size was set."""
        from bexp.tune.micro_batches import positions_of  # noqa: PLC0415 - needs torch

        turn = None
        while turn != sized.turn:
            turn = sized.turn
            for number, batch in enumerate(iterate()):
                self.is_read = True
                if sized.lengths.is_known:
                    self.lengths, self.micro_batches = sized.lengths, sized.micro_batches
                    self.number, self.positions = number, positions_of(batch)
                    if self.early is not None:
                        self.early.append((now(), number, self.positions))
                yield batch
                if turn != sized.turn:
                    break


followed = Followed()


def patch(module: ModuleType) -> None:
    """Have each loader of the trial's size begin with the longest micro-batch, if it shuffles its samples."""
    iterate = module.DataLoader.__iter__

    @wraps(iterate)
    def iterate_worst_first(self: Any) -> Any:
        ours = _worst_first(self)
        return iterate(self) if ours is None else followed.follow(partial(iterate, ours.loader), ours)

    module.DataLoader.__iter__ = iterate_worst_first


def training_loader(given: Iterable[Any]) -> DataLoader[Any] | None:
    """Return the loader that a training reads, of those that are prepared together: the first that is shuffled.

    If none is, it is the first. If the size stands in braces in the command, others than those of this size are none.
    """
    from torch.utils.data import DataLoader  # noqa: PLC0415 - it is complete by now

    sizes = {None, size_in_braces()}
    loaders = [each for each in given if isinstance(each, DataLoader) and (len(sizes) == 1 or each.batch_size in sizes)]
    return next(filter(is_shuffled, loaders), loaders[0] if loaders else None)


def is_shuffled(given: Any) -> bool:
    """Return whether this is a loader in another order than that of its data, or of a stream."""
    from torch.utils.data import DataLoader, SequentialSampler  # noqa: PLC0415 - they are complete by now

    return isinstance(given, DataLoader) and not isinstance(given.sampler, SequentialSampler)


def resize(loader: DataLoader[Any], size: int) -> None:
    """Give a loader another size in place: order, workers and length are as if it had been made with this size."""
    loader.batch_sampler.batch_size = vars(loader)["batch_size"] = size  # type: ignore[union-attr]  # torch's own


def with_sampler(loader: DataLoader[Any], size: int, sampler: Any) -> DataLoader[Any]:
    """Return a loader of the same data with another size and order."""
    from torch.utils.data import DataLoader  # noqa: PLC0415 - it is complete by now

    return DataLoader(
        loader.dataset,
        batch_size=size,
        sampler=sampler,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        worker_init_fn=loader.worker_init_fn,
        persistent_workers=loader.persistent_workers,
        prefetch_factor=loader.prefetch_factor,
    )


def follow(sized: SizedLoader) -> DataLoader[Any]:
    """Note each micro-batch of a loader when the loop takes it, and return the loader."""
    vars(sized.loader)[_OURS] = sized
    return sized.loader


def _worst_first(loader: Any) -> SizedLoader | None:
    """Return the loader that replaces another; None if the other serves the Trainer, accelerate or no training."""
    from torch.utils.data import RandomSampler  # noqa: PLC0415 - it is complete by now

    from bexp.tune.lengths import Lengths  # noqa: PLC0415 - needs torch

    if _OURS not in vars(loader):
        if asked or serving or str(loader.batch_size) != os.environ.get(SIZE):
            return None
        if not isinstance(loader.sampler, RandomSampler):  # the data of an evaluation is not shuffled
            return None
        lengths = Lengths.of(loader.dataset)
        vars(loader)[_OURS] = _replaced(loader, lengths) if lengths.is_known else None
    ours: SizedLoader | None = vars(loader)[_OURS]
    return ours


def _replaced(loader: DataLoader[Any], lengths: Lengths) -> SizedLoader:
    from bexp.tune.micro_batches import epoch_of, order_of  # noqa: PLC0415 - needs torch

    size, steps = int(os.environ[SIZE]), int(os.environ.get(STEPS) or 1)
    longest_at = {0, 1, steps, steps + 1}  # the second pair meets the optimizer's state
    epoch = epoch_of(loader.sampler, lengths)
    return SizedLoader(
        loader, size, lengths, lambda size: order_of(loader.sampler, epoch, lengths, size, longest_at=longest_at)
    )
