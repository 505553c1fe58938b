"""The lengths of the samples that a training draws from, and the longest micro-batch among them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import Sampler

WORST_TIMES = 4
FEWEST_BATCHES = 400
"""Micro-batches before a loop of the data ends, so that none ends before its steps are timed."""
MOST_SAMPLES = 20_000
MOST_SECONDS = 10.0
"""Samples are read until there are so many, or for so long. The longest of the others is then not known."""
COLUMNS = ("input_ids", "input_features", "pixel_values")
ENDING = "_ids"
"""A sample without one of these columns has several texts, such as `prompt_ids`, `chosen_ids` and `rejected_ids`."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of the samples that were read, by their place; `number` is that of all samples, None for a stream."""

    tokens: tuple[int, ...]
    number: int | None

    @classmethod
    def of(cls, dataset: Any) -> Lengths:
        """The lengths in a dataset whose samples can be read in any order; none of a stream."""
        try:
            number = len(dataset)
        except TypeError:
            return cls((), None)
        tokens, begun = [], time.monotonic()
        for place in range(min(number, MOST_SAMPLES)):
            try:
                length = _length(dataset[place])
            except (NotImplementedError, TypeError, KeyError, IndexError):  # a stream that knows how long it is
                break
            if length is None or time.monotonic() - begun > MOST_SECONDS:
                break
            tokens.append(length)
        return cls(tuple(tokens), number)

    @property
    def is_known(self) -> bool:
        """Whether samples have lengths that could be read."""
        return bool(self.tokens)

    @property
    def mean(self) -> float:
        """Tokens of a sample in the mean; 1 where they are not known, so that rates are in samples."""
        return sum(self.tokens) / len(self.tokens) if self.tokens else 1.0

    def longest(self, number: int) -> list[int]:
        """The places of the longest samples, the longest first; some occur again if there are too few."""
        order = sorted(range(len(self.tokens)), key=lambda place: -self.tokens[place])
        return [order[i % len(order)] for i in range(number)]

    def describe(self) -> dict[str, Any]:
        """What is known, for the trial."""
        return {
            "num_samples": self.number,
            "num_read": len(self.tokens),
            "mean": self.mean,
            "longest": max(self.tokens, default=None),
        }


class WorstFirst(Sampler[int]):
    """The longest micro-batch WORST_TIMES, then the order of another sampler, again and again.

    `size` is that of a micro-batch over all processes. With the longest in two optimizer steps, one of them meets the
    optimizer's state and gradients that have added up.
    """

    def __init__(self, lengths: Lengths, size: int, order: Collection[int]) -> None:
        self._lengths = lengths
        self._size = size
        self._order = order

    def __len__(self) -> int:
        return WORST_TIMES * self._size + max(len(self._order), FEWEST_BATCHES * self._size)

    def __iter__(self) -> Iterator[int]:
        for _ in range(WORST_TIMES):
            yield from self._lengths.longest(self._size)
        left = len(self) - WORST_TIMES * self._size
        while left > 0:
            for place in islice(iter(self._order), left):
                yield place
                left -= 1


def _length(sample: Any) -> int | None:
    """Tokens of a sample; None if it has none."""
    if not isinstance(sample, dict) and not hasattr(sample, "keys"):
        return None
    for column in COLUMNS:
        if column in sample:
            return len(sample[column])
    texts = [sample[column] for column in sample if column.endswith(ENDING)]
    return sum(map(len, texts)) if texts and all(hasattr(text, "__len__") for text in texts) else None
