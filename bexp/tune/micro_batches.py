"""The micro-batches of one size: those that a trial runs, and those that the training will see."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import RandomSampler, SequentialSampler

from bexp.explorer.cost.epochs import Epoch, Places, cut_epochs
from bexp.explorer.cost.expectation import Figures, expect
from bexp.tune.lengths import FEWEST_BATCHES, WORST_TIMES, Lengths, WorstFirst

if TYPE_CHECKING:
    from bexp.tune.micro_step import MicroStep

PACKED = 0
PADDINGS = (1, 8, 16, 32, 64, 128)
"""Rows are padded to the longest, and to a multiple of this."""
TOLERANCE = 0.05
"""A way of making micro-batches explains the positions that were seen if it is no further off than this."""
FEWEST_DRAWN = 4
ALIKE = 1.1
"""How much longer than another time an early one of the longest micro-batch may take, and not be one of warming up."""
AGAIN = range(WORST_TIMES + 6, 100_000, 15)
"""Where the longest micro-batch comes again: its first times load kernels and grow the allocator's cache."""
CYCLE = 13
"""Micro-batches that are drawn, and then come again: their widths are new only once. So many are spread most evenly."""
planned: dict[int, float] = {}
"""What the first micro-step of a width takes longer in this process, by the size."""
FEWEST_PAIRS = 2
"""The first micro-batch of all has a new width as well, and so much more to do that it shows nothing."""
GOLDEN = (5**0.5 - 1) / 2
"""Multiples of it, modulo 1, are spread evenly, however many of them there are."""


def epoch_of(sampler: Any, lengths: Lengths) -> Epoch | None:
    """Return the order of torch's own samplers, among the samples that were read; None for any other sampler."""
    number = len(lengths.tokens)
    if isinstance(sampler, RandomSampler):
        return lambda seed: np.random.default_rng(seed).permutation(number)
    if isinstance(sampler, SequentialSampler):
        return lambda _: range(number)
    return None


def order_of(
    sampler: Any,
    epoch: Epoch | None,
    lengths: Lengths,
    size: int,
    *,
    processes: int = 1,
    rank: int = 0,
    longest_at: Collection[int] = range(WORST_TIMES),
) -> tuple[WorstFirst, MicroBatches | None]:
    """Return the order of a trial in place of a sampler's, and the micro-batches if they are known and vary.

    If they do not vary, or if the sampler's epoch is not known, its own order follows the longest micro-batch.
    """
    if epoch is not None:
        made = MicroBatches(lengths, epoch, size, processes=processes, rank=rank, longest_at=longest_at)
        made.is_random = isinstance(sampler, RandomSampler)
        if made.varies:
            return made.sampler, made
    return WorstFirst(lengths, size * processes, sampler, longest_at=longest_at), None


def positions_of(batch: Any) -> int | None:
    """Return for how many tokens a micro-batch is computed, padding included; None if that cannot be seen.

    They are those of its largest tensor of integers, or of all `input_ids` if it has several.
    """
    named = (
        dict(batch) if isinstance(batch, Mapping) else dict(enumerate(batch)) if isinstance(batch, tuple | list) else {}
    )
    sizes = {
        str(name): tensor.numel()
        for name, tensor in named.items()
        if isinstance(tensor, torch.Tensor) and tensor.ndim <= 2 and tensor.dtype in (torch.int64, torch.int32)
    }
    texts = [size for name, size in sizes.items() if name.endswith("input_ids")]
    return sum(texts) if len(texts) > 1 else max(sizes.values(), default=None)


class MicroBatches:
    """The longest micro-batch first, and then some of all lengths, in the shares that the training will see.

    An epoch with a fixed seed is cut into micro-batches of the size. A trial runs them from all over their order by
    length, so that the first few are as long in the mean as all of them.
    """

    def __init__(
        self,
        lengths: Lengths,
        epoch: Epoch,
        size: int,
        *,
        processes: int = 1,
        rank: int = 0,
        longest_at: Collection[int] = range(WORST_TIMES),
    ) -> None:
        self.lengths = lengths
        self.is_random = False
        self._padding: int | None = None
        self._size = size
        self._own = slice(rank * size, (rank + 1) * size)
        self._rank, self._num_processes = rank, processes
        self._tokens = np.array(lengths.tokens, np.float64)
        self._widths = np.array(lengths.widths, np.float64)
        whole = size * processes
        self._simulated = cut_epochs(epoch, whole)
        widths, tokens = self._widths[self._simulated].max(axis=1), self._tokens[self._simulated].sum(axis=1)
        self.varies = bool(np.ptp(widths) > TOLERANCE * widths.mean() or np.ptp(tokens) > TOLERANCE * tokens.mean())
        """Whether the training's micro-batches differ in length."""
        self._by_length = np.argsort(widths * whole + tokens, kind="stable")
        last = max(len(self._simulated), FEWEST_BATCHES)  # all of these must come before the order begins anew
        self._longest_at = frozenset(longest_at) | frozenset(at for at in AGAIN if at < last)
        self._longest = np.array(lengths.longest(whole))
        self.sampler = WorstFirst(lengths, whole, _Drawn(self), longest_at=self._longest_at)

    @property
    def tail(self) -> list[int] | None:
        """The tokens that 1 in 1, 2, 4, ... samples have at least; None if rows are not padded in a random order.

        The last are those of the longest.
        """
        if not self.is_random or self._padding in (None, PACKED):
            return None
        number = len(self._widths)
        places = [number - max(1, number >> power) for power in range(number.bit_length())]
        return [int(width) for width in np.sort(self._widths)[places]]

    def is_longest(self, number: int) -> bool:
        """Whether the micro-batch with this number is the longest of all."""
        return number % self.sampler.num_batches in self._longest_at

    def drawn(self, number: int) -> Places:
        """The places of the samples of a micro-batch, in all processes; those with the longest are not counted."""
        share = (0.5 + number % CYCLE * GOLDEN) % 1.0
        places: Places = self._simulated[self._by_length[int(share * len(self._by_length))]]
        return places

    def num_simulated(self) -> int:
        """How many micro-batches stand for the training's, in all processes together."""
        return len(self._simulated)

    def expect(self, steps: Sequence[MicroStep]) -> tuple[float, float] | None:
        """Return the seconds of a micro-step in the mean over the training, and their standard error.

        None if too few were timed, or if it is not known how the positions of these follow from the lengths of the
        samples. Of the longest those that ran before the clock count as well, if they were as fast as later ones.
        """
        known = [
            (step, self._places(step.number), self.is_longest(step.number))
            for step in steps
            if step.number is not None and step.positions
        ]
        fastest = min((step.seconds for step, _, is_longest in known if is_longest), default=0.0)
        used = [each for each in known if each[0].is_timed or (each[2] and each[0].seconds <= ALIKE * fastest)]
        is_drawn = np.array([not is_longest for *_, is_longest in used], np.bool_)
        if is_drawn.sum() < FEWEST_DRAWN:
            return None
        places = np.stack([places for _, places, _ in used])
        seen = np.array([step.positions for step, *_ in used], np.float64)
        padding = self._padding = self._find_padding(places, seen)
        if padding is None:
            return None
        population = self._work(self._simulated.reshape(-1, self._size), padding)
        seconds = np.array([step.seconds for step, *_ in used])
        mean, error = expect(self._work(places, padding), seconds, is_drawn, population)
        return mean + self._new_width_seconds(steps, population[:, 0].reshape(-1, self._num_processes)), error

    def widths_of_others(self, number: int) -> list[tuple[int, float]]:
        """The processes beside this one, each with the longest row of its part of a micro-batch."""
        widths = self._widths[self._whole(number)].reshape(-1, self._size).max(axis=1)
        return [(rank, float(width)) for rank, width in enumerate(widths) if rank != self._rank]

    def _new_width_seconds(self, steps: Sequence[MicroStep], positions: Figures) -> float:
        """What the first micro-batches of a width add to one in the mean over an epoch, at least.

        `positions` are those of each process's part, a row for each micro-batch. Samples that were not read may have
        other widths. Kernels may be planned anew for each width, as cuDNN's attention is, and all processes wait for
        the one that does. The first micro-step of each shows it, and those that repeat it do not. Early ones
        took up to three times as long on a GPU, probably because they also load kernels, so that the least counts. A
        size that is measured again meets the same widths, which are planned by then: what it took at first counts.
        """
        firsts: dict[object, float] = {}
        later: dict[object, list[float]] = {}
        for step in steps:
            width = (step.positions, *self.widths_of_others(step.number or 0))
            if step.is_first:
                firsts.setdefault(width, step.seconds)
            else:
                later.setdefault(width, []).append(step.seconds)
        longer = [seconds - statistics.median(later[width]) for width, seconds in firsts.items() if width in later]
        if len(longer) < FEWEST_PAIRS:
            return 0.0
        each = planned.setdefault(self._size, max(0.0, min(longer)))
        whole = self._size * self._num_processes
        one_epoch = positions[: max(1, len(self._tokens) // whole)]
        number = max(len(one_epoch), (self.lengths.number or 0) // whole)
        new = {place for own in one_epoch.T for place in np.unique(own, return_index=True)[1]}
        return len(new) / number * each

    def _places(self, number: int) -> Places:
        """The places of the samples of a micro-batch of this process."""
        return self._whole(number)[self._own]

    def _whole(self, number: int) -> Places:
        """The places of the samples of a micro-batch, in all processes."""
        number %= self.sampler.num_batches
        if number in self._longest_at:
            return self._longest
        return self.drawn(number - sum(at < number for at in self._longest_at))

    def _find_padding(self, places: Places, seen: Figures) -> int | None:
        """How micro-batches are made, by the positions that were seen; None if in no way that is known."""
        off = {
            padding: float(np.abs(seen / self._work(places, padding)[:, 0] - 1).mean())
            for padding in (PADDINGS[0], PACKED, *PADDINGS[1:])
        }
        best = min(off, key=lambda padding: off[padding])
        return best if off[best] <= TOLERANCE else None

    def _work(self, places: Places, padding: int) -> Figures:
        """For each micro-batch its positions, and the pairs of them that attention computes."""
        if padding == PACKED:
            return np.column_stack([self._tokens[places].sum(axis=1), np.square(self._tokens[places]).sum(axis=1)])
        widths = np.ceil(self._widths[places].max(axis=1) / padding) * padding
        positions = self._size * self.lengths.rows * widths
        return np.column_stack([positions, positions * widths])


class _Drawn:
    """The places of the micro-batches that a trial draws, one after the other."""

    def __init__(self, micro_batches: MicroBatches) -> None:
        self._micro_batches = micro_batches

    def __len__(self) -> int:
        return self._micro_batches.num_simulated() * len(self._micro_batches.drawn(0))

    def __iter__(self) -> Iterator[int]:
        for number in range(self._micro_batches.num_simulated()):
            yield from map(int, self._micro_batches.drawn(number))
