"""The texts of a request: their micro-batches, and their tokens in a sequence.

NumPy is imported only for texts of unequal lengths, because a command that prints an answer does not need it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from bexp.explorer.model.lengths import PACKED, Batching, CutLengths, Lengths
from bexp.explorer.model.parts import ExploredModel
from bexp.explorer.request.request import ExplorationRequest

if TYPE_CHECKING:
    from bexp.explorer.cost.text_batches import TextBatches


def text_batches(request: ExplorationRequest, size: int) -> TextBatches | None:
    """Return the micro-batches of `size`; None if all sequences of the request have one length."""
    batching = request.batching_of_texts
    if request.lengths is None or batching is None or size < 1:
        return None
    steps = max(1, (request.batch_size or size) // size) if batching == "grouped" else 1
    return _text_batches(request.lengths, batching, request.seq_length, size, steps * size)


def tokens_per_sequence(model: ExploredModel, request: ExplorationRequest) -> float:
    """Return the mean tokens of texts, without padding, in a sequence, which is a text or a packed row."""
    if request.lengths is None:
        return float(model.seq_length)
    if request.batching in PACKED:
        return _packed_tokens(request.lengths, request.seq_length)
    return _cut(request.lengths, request.seq_length).mean


def widest(model: ExploredModel, request: ExplorationRequest) -> int:
    """Return the tokens of the longest sequence, for which memory is counted."""
    if request.lengths is None or request.batching in PACKED:
        return model.seq_length
    return min(model.seq_length, _cut(request.lengths, request.seq_length).lengths[-1])


@lru_cache(maxsize=16)
def _cut(lengths: Lengths, seq_length: int) -> CutLengths:
    return lengths.cut(seq_length)


@lru_cache(maxsize=256)
def _text_batches(lengths: Lengths, batching: Batching, seq_length: int, size: int, step_size: int) -> TextBatches:
    from bexp.explorer.cost.text_batches import TextBatches  # noqa: PLC0415 - see above

    return TextBatches(_cut(lengths, seq_length), batching, seq_length, size, step_size)


@lru_cache(maxsize=16)
def _packed_tokens(lengths: Lengths, seq_length: int) -> float:
    from bexp.explorer.cost.text_batches import packed_share  # noqa: PLC0415 - see above

    return packed_share(_cut(lengths, seq_length), seq_length) * seq_length
