"""Context parallelism: which devices share a sequence, and how much work each layout gives to the busiest of them.

Attention passes keys and values around a ring of devices (Ring Attention, Liu et al., 2023, arXiv:2310.01889). The
layout `ring` gives each device a contiguous piece, `striped` every N-th token (Brandon et al., 2023, arXiv:2311.09431),
and `zigzag` one piece from either end (Grattafiori et al., 2024, arXiv:2407.21783, section 3.3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from bexp.explorer.dimensions.dimension import Dimension, Row
from bexp.explorer.model.base import Frozen, RuleError

if TYPE_CHECKING:
    from bexp.explorer.dimensions.candidate import Candidate

LayoutName = Literal["ring", "striped", "zigzag"]

LAYOUTS: tuple[LayoutName, ...] = ("ring", "striped", "zigzag")
CHUNKS_PER_DEVICE = {"ring": 1, "striped": 1, "zigzag": 2}
"""The number of pieces that a layout cuts a device's tokens into; the sequence length is a multiple of all pieces."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How many devices share each sequence, and by which layout; the layout of a single device is None."""

    size: int = 1
    layout: str | None = None


ALONE = Sharing()


class ContextParallelSpec(Frozen):
    """How many devices each sequence may be spread over, and how.

    `sizes` divide num_devices; the remaining factor is data parallelism. `explore` tries every divisor that the
    sequence length and the batch admit, up to the number of devices that the worker has. `layouts` are the ones to try
    where several devices share a sequence.
    """

    sizes: (
        Literal["explore"]
        | Annotated[tuple[Annotated[int, Field(ge=1, le=4096)], ...], Field(min_length=1, max_length=16)]
    ) = (1,)
    layouts: Annotated[tuple[LayoutName, ...], Field(min_length=1, max_length=len(LAYOUTS))] = LAYOUTS

    def layouts_over(self, size: int, seq_length: int) -> tuple[str, ...]:
        """Return the layouts that spread sequences of `seq_length` tokens over `size` devices."""
        allowed = [name for name in LAYOUTS if name in self.layouts]
        return tuple(name for name in allowed if refuse_layout(name, size, seq_length) is None)


def refuse_layout(layout: str, size: int, seq_length: int) -> str | None:
    """Return why a layout cannot spread sequences of this length over `size` devices; None if it can."""
    multiple = CHUNKS_PER_DEVICE[layout] * size
    if seq_length % multiple:
        return f"the {layout} layout over {size} devices takes multiples of {multiple} tokens, not {seq_length}"
    return None


@dataclass(frozen=True, slots=True)
class CausalPairs:
    """Numbers of pairs of a query and a key, for one head of one sequence.

    `attended` pairs lie below the causal diagonal; a fused kernel computes these. `scored` pairs are all pairs of the
    blocks that hold an attended one; an implementation without such a kernel computes them all.
    """

    attended: int
    scored: int


def busiest_pairs(sharing: Sharing, seq_length: int) -> CausalPairs:
    """Return what the busiest device computes; the others wait for it in every step of the ring.

    With L = S / N tokens a device, the last device of `ring` attends to all of N - 1 blocks and to half of its own. A
    device of `striped` attends to half of each block. A device of `zigzag` attends to half of its own block and to half
    of every other block, because one half of each is older than one of its two pieces.
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


class SharingOf(Frozen):
    """How the devices of a candidate share sequences."""

    context_parallel_size: Annotated[int, Field(ge=1)] = Field(1, description="Devices that share each sequence.")
    context_parallel_layout: str | None = Field(
        None, description="Which of them holds which tokens; null if each sequence has a device to itself."
    )

    @model_validator(mode="after")
    def _layout_of_several(self) -> Self:
        if (self.context_parallel_layout is None) is not (self.context_parallel_size == 1):
            raise RuleError(
                "a context_parallel_layout belongs to a context_parallel_size above 1, and to no other",
                "context_parallel_layout",
                "context_parallel_size",
            )
        return self


class SharingAsked(Frozen):
    """What a request says of devices that share sequences."""

    context_parallel: ContextParallelSpec = ContextParallelSpec()


def _label(candidate: Candidate) -> str | None:
    if candidate.context_parallel_layout is None:
        return None
    return f"context_parallel={candidate.context_parallel_size}:{candidate.context_parallel_layout}"


def _row(candidate: Candidate) -> Row | None:
    if candidate.context_parallel_layout is None:
        return None
    size, layout = candidate.context_parallel_size, candidate.context_parallel_layout
    return "context parallel", f"{size} devices per sequence, {layout}"


CONTEXT_PARALLEL = Dimension(
    name="context_parallel",
    fields=("context_parallel_size", "context_parallel_layout"),
    asked="context_parallel",
    label=_label,
    row=_row,
)
