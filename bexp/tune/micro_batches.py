"""The micro-batches of one size: those that a trial runs, and those that the training will see."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import RandomSampler, SequentialSampler

from bexp.explorer.cost.text_batches import Epoch, Figures, Places, cut_epochs, expect
from bexp.tune.lengths import FEWEST_BATCHES, WORST_TIMES, Lengths, WorstFirst

if TYPE_CHECKING:
    from bexp.tune.clock import MicroStep

PACKED = 0
PADDINGS = (1, 8, 16, 32, 64, 128)
"""Rows are padded to the longest, rounded up to a multiple of one of these."""
TOLERANCE = 0.05
"""A padding explains the positions that were seen if it is no further off than this, in the mean."""
FEWEST_DRAWN = 4
ALIKE = 1.1
"""An early run of the longest micro-batch counts, and is no warm-up, if it takes at most so many times the fastest."""
AGAIN = range(WORST_TIMES + 6, 100_000, 15)
"""Where the longest micro-batch comes again: its first times load kernels and grow the allocator's cache."""
CYCLE = 13
"""Micro-batches are drawn in this number, and then come again, so that widths are new only once.

This number of them is spread most evenly.
"""
planned: dict[int, list[float]] = {}
"""Additional seconds of first micro-steps of a width in this process, by the size."""
FEWEST_PAIRS = 2
"""One pair is not enough: the very first micro-batch has so much more to do that it shows nothing of its width."""
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
    """Return the order of a trial, which replaces a sampler's, and the micro-batches if they are known and vary.

    If they do not vary, or if the sampler's epoch is not known, its own order follows the longest micro-batch.
    """
    if epoch is not None:
        made = MicroBatches(lengths, epoch, size, processes=processes, rank=rank, longest_at=longest_at)
        made.is_random = isinstance(sampler, RandomSampler)
        if made.varies:
            return made.sampler, made
    return WorstFirst(lengths, size * processes, sampler, longest_at=longest_at), None


def positions_of(batch: Any) -> int | None:
    """Return the number of tokens of a micro-batch, padding included; None if it cannot be seen.

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


@dataclass(frozen=True)
class Expected:
    """The mean seconds of a micro-step over a training with their standard error, and what new widths add to them."""

    seconds: float
    error: float
    new_width_seconds: float
    """Of a micro-step that is the first of its width, in addition."""
    new_width_share: float
    """The micro-steps of an epoch that are the first of their width."""
    timed: Sequence[tuple[float, float]]
    """The seconds of each timed micro-step, and those that the fit gives to one of its length."""


class MicroBatches:
    """The longest micro-batch first, and then some of all lengths, in the shares that the training will see.

    An epoch with a fixed seed is cut into micro-batches of the size, which are sorted by length. A trial draws evenly
    from this order, so that the first few have the mean length of all.
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
        """The training's micro-batches differ in length."""
        self._by_length = np.argsort(widths * whole + tokens, kind="stable")
        last = max(len(self._simulated), FEWEST_BATCHES)  # all of these must come before the order begins anew
        self._longest_at = frozenset(longest_at) | frozenset(at for at in AGAIN if at < last)
        self._longest = np.array(lengths.longest(whole))
        self.sampler = WorstFirst(lengths, whole, _Drawn(self), longest_at=self._longest_at)

    @property
    def tail(self) -> list[int] | None:
        """The least tokens of the longest 1 in 1, 2, 4, ... samples, down to the longest one.

        None if rows are not padded in a random order.
        """
        if not self.is_random or self._padding in (None, PACKED):
            return None
        number = len(self._widths)
        places = [number - max(1, number >> power) for power in range(number.bit_length())]
        return [int(width) for width in np.sort(self._widths)[places]]

    def is_longest(self, number: int) -> bool:
        """Return whether the micro-batch with this number is the longest of all."""
        return number % self.sampler.num_batches in self._longest_at

    def drawn(self, number: int) -> Places:
        """Return the places of a micro-batch's samples in all processes. The longest micro-batch is not numbered."""
        share = (0.5 + number % CYCLE * GOLDEN) % 1.0
        places: Places = self._simulated[self._by_length[int(share * len(self._by_length))]]
        return places

    def num_simulated(self) -> int:
        """Return the number of micro-batches that represent the training's, in all processes together."""
        return len(self._simulated)

    def expect(self, steps: Sequence[MicroStep]) -> Expected | None:
        """Return what a micro-step of the training takes.

        None if too few were timed, or if no known padding explains their positions. Runs of the longest micro-batch
        before the clock count as well, if they were as fast as later ones.
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
        mean, error, fitted = expect(self._work(places, padding), seconds, is_drawn, population)
        each, share = self._new_widths(steps, population[:, 0].reshape(-1, self._num_processes))
        timed = [(step.seconds, float(own)) for (step, *_), own in zip(used, fitted, strict=True) if step.is_timed]
        return Expected(mean + share * each, error, each, share, timed)

    def widths_of_others(self, number: int) -> list[tuple[int, float]]:
        """Return the other processes, each with the longest row of its part of a micro-batch."""
        widths = self._widths[self._whole(number)].reshape(-1, self._size).max(axis=1)
        return [(rank, float(width)) for rank, width in enumerate(widths) if rank != self._rank]

    def _new_widths(self, steps: Sequence[MicroStep], positions: Figures) -> tuple[float, float]:
        """Return the seconds that a new width adds to a micro-step, and the share of an epoch's that have one.

        `positions` are those of each process's part, a row for each micro-batch. Samples that were not read may have
        other widths.

        Kernels may be planned anew for each width, as cuDNN's attention is, and all processes wait for that. The first
        micro-step of each width shows it, and repetitions do not. Early ones took up to three times as long on a GPU,
        probably because they also load kernels, so the later half of them counts. Their median over all sizes of this
        process does not move with the host's pace as the least of them does. If a quarter of them is no longer than
        later ones, nothing is planned. A size that is measured again meets widths that are planned by then, so its
        first figures count.
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
            return 0.0, 0.0
        planned.setdefault(self._size, longer[len(longer) // 2 :])
        pool = sorted(itertools.chain.from_iterable(planned.values()))
        each = statistics.median(pool) if pool[len(pool) // 4] > 0.0 else 0.0
        whole = self._size * self._num_processes
        one_epoch = positions[: max(1, len(self._tokens) // whole)]
        number = max(len(one_epoch), (self.lengths.number or 0) // whole)
        new = {place for own in one_epoch.T for place in np.unique(own, return_index=True)[1]}
        return each, len(new) / number

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
        """Return the padding that explains the positions that were seen; None if no known one does."""
        off = {
            padding: float(np.abs(seen / self._work(places, padding)[:, 0] - 1).mean())
            for padding in (PADDINGS[0], PACKED, *PADDINGS[1:])
        }
        best = min(off, key=lambda padding: off[padding])
        return best if off[best] <= TOLERANCE else None

    def _work(self, places: Places, padding: int) -> Figures:
        """Return for each micro-batch its positions, and the pairs of them that attention computes."""
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
