"""The lengths of the samples that a training draws from, and the longest micro-batch among them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any, Protocol

import numpy as np
from torch.utils.data import Sampler

WORST_TIMES = 4
FEWEST_BATCHES = 400
"""The least micro-batches of a loop over the data, so that none ends before its steps are timed."""
MOST_SAMPLES = 20_000
MOST_SECONDS = 10.0
"""Samples are read up to this number, or for so long. The longest of the others is then not known."""
COLUMNS = ("input_ids", "input_features", "pixel_values")
TARGETS = ("labels", "decoder_input_ids")
"""Columns with a text of its own if a model decodes: its length is not that of the input."""
ENDING, PROMPT = "_ids", "prompt_"
"""The ending of columns with tokens where none of COLUMNS is, and the beginning of the prompt's.

Each other column, such as `chosen_ids` and `rejected_ids`, is a text of its own, which follows the prompt.
"""


class Order(Protocol):
    """The places of samples in the order of a sampler."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...


@dataclass(frozen=True)
class Lengths:
    """The lengths of the samples that were read, by their place."""

    tokens: tuple[int, ...]
    """Of all texts of a sample."""
    number: int | None
    """Of all samples, also those that were not read; None for a stream."""
    widths: tuple[int, ...] = ()
    """Tokens of a sample's longest text."""
    rows: int = 1
    """The rows of a micro-batch that a sample takes, one for each of its texts."""
    widest: tuple[int, ...] = ()
    """The places of the samples that have the longest of each text, if texts are padded one by one."""

    @classmethod
    def of(cls, dataset: Any) -> Lengths:
        """Return the lengths in a dataset whose samples can be read in any order; none for a stream."""
        try:
            number = len(dataset)
        except TypeError:
            return cls((), None)
        samples: list[_Sample] = []
        begun = time.monotonic()
        for place in range(min(number, MOST_SAMPLES)):
            try:
                found = _Sample.of(dataset[place])
            except Exception:  # noqa: BLE001 - a stream that knows how long it is, or what is read by `__getitems__`
                break
            if found is None or time.monotonic() - begun > MOST_SECONDS:
                break
            samples.append(found)
        rows = max((len(each.rows) for each in samples), default=1)
        inputs, targets = [max(each.rows) for each in samples], [each.target for each in samples]
        if not any(target and target != own for own, target in zip(inputs, targets, strict=True)):
            return cls(tuple(each.tokens for each in samples), number, tuple(inputs), rows)
        places = range(len(samples))
        return cls(
            tuple(each.tokens + each.target for each in samples),
            number,
            tuple(map(max, inputs, targets)),
            rows,
            tuple(max(places, key=text.__getitem__) for text in (inputs, targets)),
        )

    @property
    def is_known(self) -> bool:
        """Whether samples have lengths that could be read."""
        return bool(self.tokens)

    @property
    def are_alike(self) -> bool:
        """Whether no sample that was read is longer than another."""
        return len(set(self.widths)) < 2

    @property
    def mean(self) -> float:
        """Mean tokens of a sample; 1 where they are not known, so that rates are in samples."""
        return sum(self.tokens) / len(self.tokens) if self.tokens else 1.0

    def longest(self, number: int) -> list[int]:
        """The places of the longest samples; some occur again if there are too few.

        The first has the longest row, to which all others may be padded. Where inputs and targets are padded one by
        one, the longest of the other text follows. The others have the most tokens.
        """
        order = sorted(range(len(self.tokens)), key=lambda place: -self.tokens[place])
        first = max(order, key=lambda place: self.widths[place])
        order.sort(key=lambda place: (place != first, place not in self.widest))
        return [order[i % len(order)] for i in range(number)]

    def describe(self) -> dict[str, Any]:
        """Return the lengths as the trial reports them."""
        found = {"number": self.number, "num_read": len(self.tokens), "longest": max(self.widths, default=0)}
        return {"mean": self.mean, "samples": found | {"rows": self.rows} if self.is_known else None}


class WorstFirst(Sampler[int]):
    """The longest micro-batch WORST_TIMES, then the order of another sampler, again and again.

    `size` is that of a micro-batch over all processes. `longest_at` are the numbers of the longest micro-batch, by
    default the first ones. It comes in two optimizer steps, the second of which meets the optimizer's state and
    accumulated gradients.
    """

    def __init__(
        self, lengths: Lengths, size: int, order: Order, *, longest_at: Collection[int] = range(WORST_TIMES)
    ) -> None:
        self._lengths = lengths
        self._size = size
        self._order = order
        self._longest_at = longest_at

    @property
    def num_batches(self) -> int:
        """Micro-batches before the order begins anew."""
        return len(self._longest_at) + max(-(-len(self._order) // self._size), FEWEST_BATCHES)

    def __len__(self) -> int:
        return self._size * self.num_batches

    def __iter__(self) -> Iterator[int]:
        others = chain.from_iterable(repeat(self._order))
        for number in range(self.num_batches):
            if number in self._longest_at:
                yield from self._lengths.longest(self._size)
            else:
                yield from islice(others, self._size)


@dataclass(frozen=True)
class _Sample:
    """The tokens of a sample, of each row that it takes in a micro-batch, and of the text that a model may decode."""

    tokens: int
    rows: list[int]
    target: int = 0

    @classmethod
    def of(cls, sample: Any) -> _Sample | None:
        """Return the tokens of a sample; None if it has none."""
        if not isinstance(sample, dict) and not hasattr(sample, "keys"):
            return None
        target = next((len(sample[name]) for name in TARGETS if name in sample and _is_text(sample[name])), 0)
        column = next((column for column in COLUMNS if column in sample), None)
        if column is not None:
            own = _length(sample[column])
            tokens = own if own is not None else target
            return None if own is None and not target else cls(tokens, [tokens], target)
        texts = {column: sample[column] for column in sample if column.endswith(ENDING)}
        if not texts or not all(hasattr(text, "__len__") for text in texts.values()):
            return None
        prompt = sum(len(text) for column, text in texts.items() if column.startswith(PROMPT))
        rows = [prompt + len(text) for column, text in texts.items() if not column.startswith(PROMPT)]
        return cls(sum(map(len, texts.values())), rows or [prompt])


def _length(column: Any) -> int | None:
    """Return the length of a text, of frames or of patches.

    None for what has no such length: a picture begins with its channels, and so do as few features of many frames.
    """
    shape = (len(column), *np.shape(column[:1])[1:])
    return shape[0] if len(shape) == 1 or (len(shape) == 2 and shape[0] > shape[1]) else None


MASKS = ("completion_mask", "assistant_masks", "loss_mask")
IGNORED = -100


def label_tokens(sample: Any) -> int | None:
    """Return the number of tokens that a sample's loss counts; None if the sample does not say."""
    if not hasattr(sample, "keys"):
        return None
    rows = {name: sample[name] for name in sample.keys() if _is_row(sample[name])}  # noqa: SIM118 - more than dicts
    if "labels" in rows:
        return sum(1 for label in _listed(rows["labels"]) if label != IGNORED)
    for name in MASKS:
        if name in rows:
            return sum(map(bool, _listed(rows[name])))
    texts = [row for name, row in rows.items() if name.endswith("_ids")]
    return sum(map(len, texts)) if texts else None


def most_unequal(tokens: Sequence[int | None]) -> list[int]:
    """Return the places of samples from few tokens to many; unsorted if the tokens of one are not known."""
    return sorted(range(len(tokens)), key=lambda place: 0 if None in tokens else tokens[place] or 0)


def _is_row(value: Any) -> bool:
    """Return whether a value is a row, and neither one number nor text."""
    return hasattr(value, "__len__") and not isinstance(value, str | bytes) and getattr(value, "ndim", 1) == 1


def _is_text(value: Any) -> bool:
    """Return whether a value is a row of more than one integer, and neither a class nor a share of each."""
    first = value[0] if _is_row(value) and len(value) > 1 else None
    return type(getattr(first, "item", lambda: first)()) is int


def _listed(values: Any) -> list[Any]:
    found: list[Any] = values.tolist() if hasattr(values, "tolist") else list(values)
    return found
