"""The lengths of the texts that a model is trained on, and how texts become micro-batches."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from bexp.explorer.model.base import Frozen, RuleError
from bexp.explorer.model.spelling import shortened

MAX_LENGTH = 1 << 24
MAX_TEXTS = 1 << 40
MAX_DISTINCT_LENGTHS = 1024
"""The most distinct lengths of a histogram; `compact_histogram` makes no more."""
FEW_LENGTHS = 64
EPOCH_TEXTS = 100_000
"""The texts of an epoch of a distribution by its parameters, which has no number of texts."""
RARE = 1e-3
"""The probability that an epoch of a distribution has a text longer than those that are counted."""
LOGNORMAL = re.compile(r"lognormal\(\s*([^,()]+?)\s*,\s*([^,()]+?)\s*\)")

Batching = Literal["padded", "grouped", "packed", "token_budget"]
PACKED: frozenset[Batching] = frozenset({"packed", "token_budget"})
"""Whole texts one after another: in each row of a micro-batch, or in one row that is the whole micro-batch."""
Length = Annotated[int, Field(ge=1, le=MAX_LENGTH)]
TextCount = Annotated[int, Field(ge=1, le=MAX_TEXTS)]


@dataclass(frozen=True, slots=True)
class CutLengths:
    """Distinct lengths in ascending order, each with the number of its texts, none longer than a sequence.

    `num_cut` texts were longer, and end at the length of a sequence. With `is_counted` the texts themselves were
    counted; else the numbers are expectations of a distribution.
    """

    lengths: tuple[int, ...]
    counts: tuple[float, ...]
    num_cut: float
    is_counted: bool

    @property
    def are_binned(self) -> bool:
        """Whether each length may stand for those down to the next shorter one; a few counted lengths do not."""
        return not self.is_counted or len(self.lengths) > FEW_LENGTHS

    @property
    def num_texts(self) -> float:
        """Texts of an epoch."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Tokens of a text."""
        return sum(n * count for n, count in zip(self.lengths, self.counts, strict=True)) / self.num_texts


class LogNormal(Frozen):
    """Lengths whose logarithm is normal with the standard deviation `sigma`; `mean` is that of the lengths, in tokens.

    Its epoch has EPOCH_TEXTS texts.
    """

    mean: Annotated[float, Field(ge=1, le=MAX_LENGTH)]
    sigma: Annotated[float, Field(gt=0, le=4)]


class Lengths(Frozen):
    """The lengths of texts: a histogram, or a distribution."""

    histogram: (
        Annotated[tuple[tuple[Length, TextCount], ...], Field(min_length=1, max_length=MAX_DISTINCT_LENGTHS)] | None
    ) = Field(None, description="Pairs of a length in tokens and the number of texts that have it.")
    lognormal: LogNormal | None = None

    @field_validator("histogram", mode="before")
    @classmethod
    def _in_order(cls, given: Any) -> Any:
        return given if given is None else read_histogram(given)

    def cut(self, seq_length: int) -> CutLengths:
        """Return the lengths of texts that end at `seq_length`."""
        if self.lognormal is not None:
            return _cut_lognormal(self.lognormal, seq_length)
        counts: dict[int, float] = {}
        for length, count in self.histogram or ():
            counts[min(length, seq_length)] = counts.get(min(length, seq_length), 0) + count
        num_cut = sum(count for length, count in self.histogram or () if length > seq_length)
        return CutLengths(tuple(counts), tuple(counts.values()), num_cut, is_counted=True)


def expand_lengths(data: dict[str, Any]) -> dict[str, Any]:
    """Write `lognormal(mean, sigma)`, or a histogram by itself, as the mapping that it stands for.

    Raises RuleError if the text is no distribution, or the value has neither or both of the fields.
    """
    given = data.get("lengths")
    if given is None or isinstance(given, Lengths):
        return data
    if isinstance(given, str):
        parameters = LOGNORMAL.fullmatch(given.strip())
        if parameters is None:
            raise RuleError(
                "as a text they are lognormal(mean, sigma); others are pairs such as [[512, 40], [2048, 3]], or a file "
                "that --lengths names",
                "lengths",
            )
        given = {"lognormal": {"mean": parameters[1], "sigma": parameters[2]}}
    elif isinstance(given, (list, tuple)) or (isinstance(given, Mapping) and not _is_named(given)):
        given = {"histogram": given}
    if not isinstance(given, Mapping) or sum(given.get(name) is not None for name in Lengths.model_fields) != 1:
        raise RuleError("has either a histogram or a lognormal", "lengths")
    return {**data, "lengths": given}


def _is_named(given: Mapping[Any, Any]) -> bool:
    return bool(given) and any(str(name) in Lengths.model_fields for name in given)


def read_histogram(given: Any) -> tuple[tuple[int, int], ...]:
    """Return pairs of a length and a number of texts in ascending order, each length once.

    `given` is such pairs, or a mapping of lengths to numbers.

    Raises ValueError if there are no pairs, or one of the numbers is no whole number that is at least 1.
    """
    pairs = list(given.items()) if isinstance(given, Mapping) else list(given) if isinstance(given, Iterable) else []
    if not pairs or isinstance(given, str):
        raise ValueError("has no lengths: it is a mapping of each length in tokens to its number of texts")
    counts: dict[int, int] = {}
    for place, pair in enumerate(pairs, 1):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise ValueError(f"entry {place} is no pair of a length in tokens and its number of texts")
        length, count = (read_count(value, f"{what} in entry {place}") for value, what in zip(pair, _PAIR, strict=True))
        counts[length] = counts.get(length, 0) + count
    return tuple(sorted(counts.items()))


_PAIR = ("the length in tokens", "the number of texts")


def read_count(value: Any, what: str) -> int:
    """Return a whole number that is at least 1.

    Raises ValueError if the value is no such number. The message names `what` it stands for, and not the value
    itself.
    """
    text = str(value).strip()
    if isinstance(value, bool) or not (text.isascii() and text.isdecimal()) or len(text) > 15 or int(text) < 1:
        raise ValueError(f"{what} must be a whole number from 1 on")
    return int(text)


def compact_histogram(counts: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    """Return a histogram of at most MAX_DISTINCT_LENGTHS lengths with the same number of texts and the same longest.

    Lengths within the same share of each other become their mean, rounded up.
    """
    ordered = sorted(counts.items())
    if len(ordered) <= MAX_DISTINCT_LENGTHS:
        return tuple(ordered)
    longest, step = ordered[-1], math.log(ordered[-1][0]) / (MAX_DISTINCT_LENGTHS - 2)
    bins: dict[int, list[int]] = {}
    for length, count in ordered[:-1]:
        tokens, texts = bins.get(place := int(math.log(length) / step), [0, 0])
        bins[place] = [tokens + length * count, texts + count]
    return (*((-(-tokens // texts), texts) for tokens, texts in bins.values()), longest)


def _cut_lognormal(given: LogNormal, seq_length: int) -> CutLengths:
    """Cut a log-normal distribution into lengths that are a few percent apart, with the texts that each stands for."""
    centre = math.log(given.mean) - given.sigma**2 / 2

    def longer(length: float) -> float:
        """Return the share of texts that are longer."""
        return 0.5 * math.erfc((math.log(length) - centre) / (given.sigma * math.sqrt(2)))

    lengths: dict[int, float] = {}
    number = min(seq_length, MAX_DISTINCT_LENGTHS // 2)
    ends = sorted({max(1, round(seq_length ** (i / number))) for i in range(number + 1)})
    below, before = 1.0, 0
    for end in ends:
        share = longer(end + 0.5)
        is_last = end == seq_length or EPOCH_TEXTS * share < RARE
        texts = EPOCH_TEXTS * (below - (0.0 if is_last else share))
        if texts > 0:
            lengths[end if is_last else (before + 1 + end) // 2] = texts
        below, before = share, end
        if is_last:
            break
    num_cut = EPOCH_TEXTS * longer(seq_length + 0.5)
    return CutLengths(tuple(lengths), tuple(lengths.values()), num_cut, is_counted=False)


def is_distribution(text: str) -> bool:
    """Return whether a text is a distribution by its parameters, and no path."""
    return LOGNORMAL.fullmatch(text.strip()) is not None


def parse_lengths(text: str) -> dict[str, Any]:
    """Return the `lengths` of a request from a file's text.

    The text has one length in tokens a line, or is JSON: a list of lengths, or a mapping of lengths to numbers of
    texts.

    Raises ValueError if the text has no length, or something else than lengths that are whole numbers from 1 on.
    """
    if text.lstrip()[:1] in {"{", "["}:
        counts = _parse_json(text)
    else:
        lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
        counts = Counter(
            read_count(line, f"{shortened(repr(line))} in line {number}") for number, line in lines if line
        )
    if not counts:
        raise ValueError("it has no lengths: write one length in tokens a line")
    return {"histogram": [list(pair) for pair in compact_histogram(counts)]}


def _parse_json(text: str) -> Counter[int]:
    try:
        lengths = json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is neither one length a line nor JSON: {error}") from None
    if isinstance(lengths, dict) and isinstance(lengths.get("histogram"), (dict, list)):
        lengths = lengths["histogram"]
    if isinstance(lengths, list) and not any(isinstance(one, list) for one in lengths):
        return Counter(read_count(one, f"length {place}") for place, one in enumerate(lengths, 1))
    return Counter(dict(read_histogram(lengths)))
