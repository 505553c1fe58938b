"""Micro-batches of texts of unequal length: those that are measured, and the mean over an epoch.

Attention computes pairs of tokens, and everything else tokens. By these two amounts the seconds of a few micro-batches
give those of all. Epochs are cut as training draws them. Axes: N micro-batches, M texts of one.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from bexp.explorer.model.lengths import Batching, CutLengths

FEWEST_SIMULATED = 400
GROUPED_TOGETHER = 50
"""The steps that transformers' LengthGroupedSampler sorts by length together, if an epoch has four times as many."""

Places = NDArray[np.int64]
Epoch = Callable[[int], Sequence[int] | Places]
"""Returns the places of samples in the order of an epoch with this seed."""


def cut_epochs(epoch: Epoch, size: int, fewest: int = FEWEST_SIMULATED) -> Places:
    """Return enough epochs, cut into micro-batches of `size`, shape (N, M)."""
    cut: list[Places] = []
    while sum(map(len, cut)) < fewest:
        order = np.asarray(epoch(len(cut)), np.int64)
        order = order[: len(order) // size * size] if len(order) >= size else np.resize(order, size)
        cut.append(order.reshape(-1, size))
    return np.concatenate(cut)


def grouped_epoch(lengths: Places, size: int) -> Epoch:
    """Return the order of transformers' LengthGroupedSampler: shuffled, and then sorted within many steps of `size`.

    The `size` of the Trainer is that of an optimizer step on one device, accumulation included.
    """
    together = size * max(1, min(len(lengths) // (size * 4), GROUPED_TOGETHER))

    def order(seed: int) -> Places:
        shuffled = np.random.default_rng(seed).permutation(len(lengths))
        parts = [shuffled[i : i + together] for i in range(0, len(shuffled), together)]
        return np.concatenate([part[np.argsort(-lengths[part], kind="stable")] for part in parts])

    return order


def fill(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return rows of whole texts in the given order, each with as many as fit in `budget` tokens; no text is longer."""
    rows: list[list[int]] = []
    left = 0
    for length in lengths:
        if length > left:
            rows.append([])
            left = budget
        rows[-1].append(length)
        left -= length
    return rows


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return rows of at most `capacity` tokens: the longest texts first, each whole in the row that it fills best.

    This is best-fit decreasing, as TRL packs; no text is longer than a row.
    """
    rows: list[list[int]] = []
    space: list[tuple[int, int]] = []  # the tokens left in a row, and its place, in ascending order
    for length in sorted(lengths, reverse=True):
        at = bisect_left(space, (length, 0))
        if at == len(space):
            rows.append([])
            left, place = capacity, len(rows) - 1
        else:
            left, place = space.pop(at)
        rows[place].append(length)
        if left > length:
            insort(space, (left - length, place))
    return rows


LEAST_ERROR = 1e-3
"""The least standard error, as a share of the mean: a few equal seconds do not prove that there is no noise."""

Figures = NDArray[np.float64]


def expect(
    work: Figures, seconds: Figures, is_drawn: NDArray[np.bool_], population: Figures
) -> tuple[float, float, Figures]:
    """Return the mean seconds over the micro-batches of a `population`, its standard error, and the fit to `seconds`.

    Each row of `work` is one timed micro-step, with amounts to which seconds may be proportional. `population` has the
    same columns. A micro-step that `is_drawn` stands for the population. Any other only shows the slope. The mean is
    that of the drawn ones, plus the slope times the difference of the population's mean work from theirs. So it is
    right for drawn ones that resemble the population, even where seconds are no linear function of work. No factor of
    the slope is negative. Of the amounts, those are used that leave the least variance.
    """
    scale = np.maximum(population.mean(axis=0), 1e-30)
    columns = np.column_stack([np.ones(len(work)), work / scale])
    wanted = np.append(1.0, population.mean(axis=0) / scale)
    noise = columns[:, :2].sum(axis=1)  # a part of it is the same in each micro-step, and a part grows with the work
    best: tuple[float, NDArray[np.intp], Figures] | None = None
    every = range(columns.shape[1])
    for chosen in (np.array(some) for count in every for some in combinations(every, count + 1)):
        design = columns[:, chosen] / noise[:, None]
        factors, _, rank, _ = np.linalg.lstsq(design, seconds / noise, rcond=None)
        freedom = len(seconds) - len(chosen)
        if rank < len(chosen) or freedom < 1 or (factors < 0).any():
            continue
        variance = float(np.square(seconds / noise - design @ factors).sum()) / freedom
        if best is None or variance < best[0]:
            best = variance, chosen, columns[:, chosen] @ factors
    assert best is not None, "a constant alone always fits"
    variance, chosen, fitted = best
    drawn = is_drawn / is_drawn.sum()
    lack = wanted[chosen] - drawn @ columns[:, chosen]
    slope = np.linalg.pinv(columns[:, chosen] / noise[:, None]).T @ lack / noise
    weights = drawn + slope  # the mean is linear in the seconds
    mean = max(0.0, float(weights @ seconds))
    return mean, max(float(np.sqrt(variance * np.square(weights * noise).sum())), LEAST_ERROR * mean), fitted


NUM_DRAWN = 3
"""The number of measured micro-batches of usual length, in addition to the longest."""
VARIES = 0.02
"""If all micro-batches up to the longest differ from their mean by less than this share, one is measured."""
SIMULATED_TEXTS = 20_000
"""The texts that stand for an epoch if the order of texts matters; an epoch of fewer is simulated whole."""
SIMULATED_BATCHES = 2_000
PACKED_TOGETHER = 1_000
"""The texts that are packed at a time, the default of TRL and LLaMA-Factory."""
HIGHEST = 0.999
"""The share of micro-batches whose peak is at most the high peak of an answer."""


@dataclass(frozen=True, slots=True)
class TextBatch:
    """One micro-batch of texts."""

    rows: tuple[tuple[int, ...], ...]
    """The lengths of the texts in each row."""
    width: int
    """The tokens of a row."""
    is_packed: bool = False
    """Whether a row may have several texts and padding, each with its own positions.

    Otherwise a row has one text, and the rest of it is padding, which is masked.
    """
    is_flattened: bool = False
    """Whether the model gets all rows as one, which kernels for attention of variable length need."""

    def narrowed(self) -> TextBatch:
        """Return these padded texts in rows that are narrower by a token."""
        return replace(self, rows=tuple((min(n, self.width - 1),) for (n,) in self.rows), width=self.width - 1)

    @classmethod
    def whole(cls, size: int, width: int) -> TextBatch:
        """Return full rows, without padding or mask."""
        return cls(((width,),) * size, width, is_packed=True)

    @property
    def is_whole(self) -> bool:
        """Whether every row is one text of full length, which needs neither mask nor positions."""
        whole = self.is_packed and not self.is_flattened
        return whole and all(len(row) == 1 and row[0] == self.width for row in self.rows)

    @property
    def size(self) -> int:
        """The micro-batch size."""
        return len(self.rows)

    @property
    def positions(self) -> int:
        """Tokens that are computed, padding included."""
        return self.size * self.width

    @property
    def pairs(self) -> int:
        """Pairs of tokens of one text, or of a padded row, which attention computes."""
        if not self.is_packed:
            return self.size * self.width**2
        left = (self.width - sum(row) for row in self.rows)
        return sum(n * n for row in self.rows for n in row) + sum(n * n for n in left)


class TextBatches:
    """The micro-batches of one size; `step_size` are the texts of an optimizer step, which are grouped.

    With a token budget, expectations are those for as many tokens as the same number of packed rows has.

    Attributes:
        measured: the micro-batches to measure: usual ones, in the shares of an epoch, and last the longest, whose
            memory is that of the size.
        new_width_share: the share of an epoch's micro-batches that are the first of their width, for which a library
            may plan its kernels anew. It is 0 unless texts are padded: other rows are full, or are one row.
        positions_N, pairs_N, share_N: of all micro-batches, their computed tokens and pairs, and shares of an epoch.
    """

    def __init__(self, texts: CutLengths, batching: Batching, seq_length: int, size: int, step_size: int) -> None:
        if batching == "packed":
            made = _packed(texts, seq_length, size)
        elif batching == "token_budget":
            made = _budgeted(texts, seq_length, size)
        else:
            made = _padded(texts, size) if batching == "padded" else _grouped(texts, size, step_size)
        work_NA, self.share_N, batch_at, self.longest = made
        self.positions_N, self.pairs_N = work_NA[:, 0], work_NA[:, 1]
        ranked = np.argsort(self.positions_N * work_NA[:, 1].max() + self.pairs_N, kind="stable")
        below = np.cumsum(self.share_N[ranked])
        drawn = [batch_at(int(ranked[np.searchsorted(below, (i + 0.5) / NUM_DRAWN)])) for i in range(NUM_DRAWN)]
        longest = np.array([self.longest.positions, self.longest.pairs], float)
        mean = self.share_N @ work_NA
        self._share = 1.0
        if batching == "token_budget":  # rows of more texts are a little fuller, and a step has as many tokens
            self._share = float(size * seq_length * packed_share(texts, seq_length) / mean[0])
        self.varies = bool((np.abs(longest - mean) > VARIES * mean).any())
        self.measured = (*drawn, self.longest) if self.varies else (self.longest,)
        self._mean_A = mean
        self.new_width_share = 0.0
        if batching in ("padded", "grouped"):
            number = sum(texts.counts) / size
            self.new_width_share = _new_share(work_NA[:, 0] / size, self.share_N, number, are_binned=texts.are_binned)

    @property
    def expected_positions(self) -> float:
        """Tokens that a micro-batch computes in the mean, padding included."""
        return self._share * float(self._mean_A[0])

    @property
    def expected_pairs(self) -> float:
        """Pairs of tokens that attention computes in the mean."""
        return self._share * float(self._mean_A[1])

    def expect(self, seconds: Sequence[float]) -> tuple[float, float]:
        """Return the mean seconds over an epoch, from those of each of `measured`, and their standard error."""
        mean, error = self._expect(seconds) if self.varies else (seconds[0], 0.0)
        return self._share * mean, self._share * error

    def _expect(self, seconds: Sequence[float]) -> tuple[float, float]:
        work = np.array([[batch.positions, batch.pairs] for batch in self.measured], float)
        is_drawn = np.arange(len(self.measured)) < NUM_DRAWN
        mean, error, _ = expect(work, np.array(seconds), is_drawn, self._mean_A[None, :])
        if np.ptp(work, axis=0).any():
            return mean, error
        less = 1 - self._mean_A[0] / work[0, 0]  # the usual ones are the longest: nothing says what less work saves
        return mean * (1 - less / 2), math.hypot(error, mean * less / 2)

    def peaks(self, peaks: Sequence[int]) -> tuple[float, float]:
        """Return the mean peak of a micro-batch, and the HIGHEST percentile, from the peaks of each of `measured`.

        Memory follows from tokens. It is interpolated between measured micro-batches, and constant below the smallest.
        """
        known = sorted({batch.positions: peak for batch, peak in zip(self.measured, peaks, strict=True)}.items())
        at, bytes_ = np.array(known, float).T
        peak_N = np.interp(self.positions_N, at, bytes_)
        order = np.argsort(peak_N, kind="stable")
        place = np.searchsorted(np.cumsum(self.share_N[order]), HIGHEST)
        return float(self.share_N @ peak_N), float(peak_N[order[min(int(place), len(order) - 1)]])


BatchAt = Callable[[int], TextBatch]
"""Returns the micro-batch at a place among all of them."""
Made = tuple[Figures, Figures, BatchAt, TextBatch]
"""Positions and pairs of each micro-batch, shape (N, 2), its share, the function that makes it, and the longest."""


def _padded(texts: CutLengths, size: int) -> Made:
    """Return rows padded to the longest of `size` texts, drawn at random: widths have known probabilities."""
    lengths, counts = np.array(texts.lengths), np.array(texts.counts)
    below = np.cumsum(counts) / counts.sum()

    def batch_at(place: int) -> TextBatch:
        up_to = below[: place + 1] / below[place]
        others = lengths[np.searchsorted(up_to, (np.arange(size - 1) + 0.5) / max(1, size - 1))]
        return TextBatch(((int(lengths[place]),), *((int(n),) for n in others)), int(lengths[place]))

    share_N = np.diff(below**size, prepend=0.0)
    return _padded_work(lengths, size), share_N / share_N.sum(), batch_at, batch_at(len(lengths) - 1)


def _grouped(texts: CutLengths, size: int, step_size: int) -> Made:
    """Return rows padded to the longest of `size` texts that lie near one another in an epoch sorted piece by piece."""
    epoch = _epoch(texts, with_longest=False)
    lengths_NM = epoch[cut_epochs(grouped_epoch(epoch, step_size), size, SIMULATED_BATCHES)]
    widths = lengths_NM.max(axis=1)

    def batch_at(place: int) -> TextBatch:
        return TextBatch(tuple((int(n),) for n in lengths_NM[place]), int(widths[place]))

    share_N = np.full(len(widths), 1 / len(widths))
    longest = texts.lengths[-1]
    others = (int(n) for n in np.sort(lengths_NM[widths.argmax()])[::-1][: size - 1])
    return _padded_work(widths, size), share_N, batch_at, TextBatch(((longest,), *((n,) for n in others)), longest)


def _packed(texts: CutLengths, seq_length: int, size: int) -> Made:
    """Return rows of whole texts, up to `seq_length` tokens each."""
    rows = _packed_rows(texts, seq_length)
    pairs = np.array([TextBatch((row,), seq_length, is_packed=True).pairs for row in rows], float)
    places_NM = cut_epochs(
        lambda seed: np.random.default_rng(seed).permutation(len(rows)), size, max(FEWEST_SIMULATED, len(rows) // size)
    )
    pairs_N = pairs[places_NM].sum(axis=1)

    def batch_at(place: int) -> TextBatch:
        return TextBatch(tuple(rows[i] for i in places_NM[place]), seq_length, is_packed=True)

    share_N = np.full(len(pairs_N), 1 / len(pairs_N))
    work_NA = np.column_stack([np.full(len(pairs_N), float(size * seq_length)), pairs_N])
    return work_NA, share_N, batch_at, batch_at(int(pairs_N.argmax()))


def _budgeted(texts: CutLengths, seq_length: int, size: int) -> Made:
    """Return one row of as many whole texts as fit in the tokens of `size` full sequences."""
    rows: list[list[int]] = []
    while len(rows) < FEWEST_SIMULATED:
        rows += fill(np.random.default_rng(len(rows)).permutation(_epoch(texts)).tolist(), size * seq_length)
    made = [TextBatch((tuple(row),), sum(row), is_packed=True, is_flattened=True) for row in rows]
    work_NA = np.array([[batch.positions, batch.pairs] for batch in made], float)
    fullest = rows[int(work_NA[:, 1].argmax())]
    longest = TextBatch((tuple(fullest),), size * seq_length, is_packed=True, is_flattened=True)
    return work_NA, np.full(len(rows), 1 / len(rows)), made.__getitem__, longest


def _new_share(width_N: Figures, share_N: Figures, number: float, *, are_binned: bool) -> float:
    """Return the share of `number` micro-batches that are the first of their width.

    A binned width stands for all widths down to the next narrower bin, in steps of the lengths' greatest common
    divisor. Each of them has an equal part of its share.
    """
    widths, places = np.unique(np.rint(width_N), return_inverse=True)
    share = np.bincount(places, share_N).clip(0.0, 1.0 - 1e-12)
    step = np.gcd.reduce(widths.astype(np.int64))
    each = np.diff(widths, prepend=0.0) / step if are_binned else np.ones(len(widths))
    expected = each * -np.expm1(number * np.log1p(-share / each))
    return float(min(1.0, expected.sum() / number))


def _padded_work(widths: Figures | Places, size: int) -> Figures:
    return np.column_stack([size * widths, size * np.square(widths)]).astype(float)


@lru_cache(maxsize=16)
def _packed_rows(texts: CutLengths, seq_length: int) -> tuple[tuple[int, ...], ...]:
    epoch = np.random.default_rng(0).permutation(_epoch(texts))
    parts = (epoch[i : i + PACKED_TOGETHER].tolist() for i in range(0, len(epoch), PACKED_TOGETHER))
    return tuple(tuple(row) for part in parts for row in pack(part, seq_length))


def packed_share(texts: CutLengths, seq_length: int) -> float:
    """Return the share of a packed row that texts fill."""
    rows = _packed_rows(texts, seq_length)
    return sum(map(sum, rows)) / (len(rows) * seq_length)


def _epoch(texts: CutLengths, *, with_longest: bool = True) -> Places:
    """Return the lengths of texts that stand for an epoch, in ascending order.

    If the true share of the longest is smaller than one of them, it is included only `with_longest`.
    """
    counts = np.array(texts.counts)
    number = max(1, min(round(counts.sum()), SIMULATED_TEXTS))
    places = np.searchsorted(np.cumsum(counts) / counts.sum(), (np.arange(number) + 0.5) / number)
    lengths: Places = np.array(texts.lengths, np.int64)[np.minimum(places, len(counts) - 1)]
    if with_longest:
        lengths[-1] = texts.lengths[-1]
    return lengths
