"""The texts that `benchmarks.trainer_runs` trains on: random tokens of given lengths, padded or packed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from bexp.explorer.model.lengths import CutLengths, Lengths, expand_lengths

NUM_DRAWN, NUM_PACKED = 100_000, 20_000
"""Texts of unequal length that are drawn, an epoch of them; later ones repeat them."""
IGNORED = -100
"""The label of a token that the loss leaves out."""
PIECE = 1000
"""Texts that are packed at a time."""


class Texts:
    """Random tokens of the lengths that a request states, or of full length; `mean` is the tokens of a text.

    `packed` texts are put together to rows of at most `seq_length` tokens; a row then takes the place of a text.
    """

    def __init__(self, vocab_size: int, seq_length: int, lengths: Any, *, packed: bool = False) -> None:
        self._vocab_size, self._seq_length, self._is_packed = vocab_size, seq_length, packed
        self._rows, self.mean = [[seq_length]], float(seq_length)
        if lengths is not None:
            found = _cut(lengths, seq_length)
            drawn = _draw(lengths, seq_length)[: NUM_PACKED if packed else None]
            self._rows = pack(drawn, seq_length) if packed else [[length] for length in drawn]
            self.mean = sum(drawn) / len(self._rows) if packed else found.mean
        self._num_rows = len(self._rows)

    def repeat(self, number: int) -> None:
        """Begin anew after so many rows, so that later micro-batches have widths that occurred before."""
        self._num_rows = number

    def epoch(self, size: int) -> tuple[float, float]:
        """Tokens of a micro-batch of an epoch in the mean, padding included, and the share of new widths."""
        if self._is_packed:
            return float(size * self._seq_length), size / len(self._rows)
        widths = [max(map(sum, self._rows[i : i + size])) for i in range(0, len(self._rows) - size + 1, size)]
        return size * sum(widths) / len(widths), len(set(widths)) / len(widths)

    def __len__(self) -> int:
        """More than any run takes."""
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Token ids and labels, shape (S,); of several texts also the position of each token in its text."""
        import torch  # noqa: PLC0415 - after the process has set the allocator

        row, generator = self._rows[index % self._num_rows % len(self._rows)], torch.Generator().manual_seed(index)
        ids_S = torch.randint(10, self._vocab_size, (sum(row),), generator=generator)
        if len(row) == 1:
            return {"input_ids": ids_S, "labels": ids_S.clone()}
        positions_S = torch.cat([torch.arange(length) for length in row])
        return {"input_ids": ids_S, "labels": ids_S.masked_fill(positions_S == 0, IGNORED), "position_ids": positions_S}


def _draw(lengths: Any, seq_length: int) -> list[int]:
    """Lengths of texts, each of which any integer may be."""
    given, rng = _lengths(lengths), random.Random(0)  # noqa: S311 - texts
    if given.lognormal is None:
        cut = given.cut(seq_length)
        return rng.choices(cut.lengths, cut.counts, k=NUM_DRAWN)
    mean, sigma = given.lognormal.mean, given.lognormal.sigma
    centre = math.log(mean) - sigma**2 / 2
    return [min(seq_length, max(1, round(rng.lognormvariate(centre, sigma)))) for _ in range(NUM_DRAWN)]


def longest_text(lengths: Any, seq_length: int) -> int:
    return _cut(lengths, seq_length).lengths[-1]


def _cut(lengths: Any, seq_length: int) -> CutLengths:
    return _lengths(lengths).cut(seq_length)


def _lengths(lengths: Any) -> Lengths:
    return Lengths.model_validate(expand_lengths({"lengths": lengths})["lengths"])


def pack(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Rows of whole texts, as lengths: the longest first, each into the fullest row that has room, piece by piece."""
    rows: list[list[int]] = []
    for begin in range(0, len(lengths), PIECE):
        piece: list[list[int]] = []
        for length in sorted(lengths[begin : begin + PIECE], reverse=True):
            room = [row for row in piece if sum(row) + length <= width]
            if room:
                max(room, key=sum).append(length)
            else:
                piece.append([length])
        rows += piece
    random.Random(0).shuffle(rows)  # noqa: S311 - texts
    return rows


class Collator:
    """Makes micro-batches, and remembers the tokens of each, padding included."""

    def __init__(self) -> None:
        self.positions: list[int] = []

    def __call__(self, texts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """A micro-batch, padded to the longest row; what pads a row of packed texts is a text of its own."""
        import torch  # noqa: PLC0415 - after the process has set the allocator

        lengths = [len(text["input_ids"]) for text in texts]
        self.positions.append(len(lengths) * max(lengths))
        batch = {
            name: torch.nn.utils.rnn.pad_sequence([text[name] for text in texts], batch_first=True, padding_value=value)
            for name, value in (("input_ids", 0), ("labels", IGNORED))
        }
        if any("position_ids" in text for text in texts):
            rest = [torch.arange(max(lengths) - length) for length in lengths]
            own = [text.get("position_ids", torch.arange(n)) for text, n in zip(texts, lengths, strict=True)]
            batch["position_ids"] = torch.stack([torch.cat(pair) for pair in zip(own, rest, strict=True)])
        elif len(set(lengths)) > 1:
            batch["attention_mask"] = (batch["labels"] != IGNORED).long()
        return batch
