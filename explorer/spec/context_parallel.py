"""Context parallelism: which devices share a sequence, and what a layout leaves the busiest of them to compute.

Attention passes keys and values around a ring of devices (Ring Attention, Liu et al., 2023, arXiv:2310.01889). `ring`
gives each a contiguous piece, `striped` every N-th token (Brandon et al., 2023, arXiv:2311.09431), `zigzag` a piece
from either end (Grattafiori et al., 2024, arXiv:2407.21783, section 3.3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from explorer.spec.base import Frozen

LayoutName = Literal["ring", "striped", "zigzag"]

LAYOUTS: tuple[LayoutName, ...] = ("ring", "striped", "zigzag")
CHUNKS_PER_DEVICE = {"ring": 1, "striped": 1, "zigzag": 2}
"""Into so many pieces a layout cuts the tokens of a device: it takes lengths that are a multiple of all pieces."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How many devices share each sequence, and by which layout; null where a sequence has a device to itself."""

    size: int = 1
    layout: str | None = None


ALONE = Sharing()


class ContextParallelSpec(Frozen):
    """Over how many devices each sequence may be spread, and how.

    `sizes` divide num_devices: the rest of it is data parallelism. `explore` tries every divisor that the sequence
    length and the batch admit, as far as the worker has devices. `layouts` are those to try where several share.
    """

    sizes: (
        Literal["explore"]
        | Annotated[tuple[Annotated[int, Field(ge=1, le=4096)], ...], Field(min_length=1, max_length=16)]
    ) = (1,)
    layouts: Annotated[tuple[LayoutName, ...], Field(min_length=1, max_length=len(LAYOUTS))] = LAYOUTS


def refuse_layout(layout: str, size: int, seq_length: int) -> str | None:
    """Why sequences of this length cannot be spread over so many devices by a layout; null if they can."""
    multiple = CHUNKS_PER_DEVICE[layout] * size
    if seq_length % multiple:
        return f"the {layout} layout over {size} devices takes multiples of {multiple} tokens, not {seq_length}"
    return None


@dataclass(frozen=True, slots=True)
class CausalPairs:
    """Pairs of a query and a key, for one head of one sequence.

    `attended` lie below the causal diagonal: what a fused kernel computes. `scored` are all of the blocks that hold
    one, which an implementation without such a kernel computes in full.
    """

    attended: int
    scored: int


def busiest_pairs(sharing: Sharing, seq_length: int) -> CausalPairs:
    """What the busiest device computes; the others wait for it, in every step of the ring.

    With L = S / N tokens a device: in `ring` the last one attends to all of N - 1 blocks and to half of its own, in
    `striped` to half of each block, in `zigzag` to half of its own and, of every other, to the half that is older than
    one of its two pieces.
    """
    length, others = seq_length // sharing.size, sharing.size - 1
    own = length * (length + 1) // 2
    if sharing.layout == "ring":
        return CausalPairs(own + others * length**2, sharing.size * length**2)
    if sharing.layout == "striped":
        return CausalPairs(sharing.size * own, sharing.size * length**2)
    assert sharing.layout == "zigzag", "a sequence on one device has no layout"
    half = length * (length // 2)
    return CausalPairs(own + others * half, length**2 + others * half)
