"""Context parallelism: the devices that share a sequence, and how much work each layout gives to the busiest of them.

Attention passes keys and values around a ring of devices (Ring Attention, Liu et al., 2023, arXiv:2310.01889). The
layout `ring` gives each device a contiguous piece, and `striped` every N-th token (Brandon et al., 2023,
arXiv:2311.09431). `zigzag` gives it one piece from either end (Grattafiori et al., 2024, arXiv:2407.21783, section
3.3.2).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from bexp.explorer.dimensions.attention import serving, usable_attention
from bexp.explorer.dimensions.dimension import Change, Column, Dimension, Point, Row, Term, unless_null
from bexp.explorer.dimensions.micro_batch_size import MICRO_BATCH_SIZE, divisors
from bexp.explorer.dimensions.place import EmptySpaceError, Place, ReportedPlace
from bexp.explorer.model.base import Frozen, RuleError

if TYPE_CHECKING:
    from bexp.explorer.dimensions.candidate import Candidate

LayoutName = Literal["ring", "striped", "zigzag"]

LAYOUTS: tuple[LayoutName, ...] = ("ring", "striped", "zigzag")
CHUNKS_PER_DEVICE = {"ring": 1, "striped": 1, "zigzag": 2}
"""The number of pieces that a layout cuts a device's tokens into; the sequence length is a multiple of all pieces."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """The number of devices that share each sequence, and their layout, which is None for a single device."""

    size: int = 1
    layout: str | None = None


ALONE = Sharing()


class ContextParallelSpec(Frozen):
    """The numbers of devices that each sequence may be spread over, and their layouts."""

    sizes: (
        Literal["explore"]
        | Annotated[tuple[Annotated[int, Field(ge=1, le=4096)], ...], Field(min_length=1, max_length=16)]
    ) = (1,)
    """Divisors of num_devices; the remaining factor is data parallelism. `explore` tries each divisor that the sequence
    length and the batch admit, up to the number of devices that the worker has.
    """
    layouts: Annotated[tuple[LayoutName, ...], Field(min_length=1, max_length=len(LAYOUTS))] = LAYOUTS
    """The layouts to try where several devices share a sequence."""

    def sizes_at(self, place: Place) -> tuple[int, ...]:
        """Return how many devices may share a sequence, ascending."""
        if self.sizes == "explore":
            return tuple(size for size in divisors(place.num_devices) if find_sharing_problem(size, place) is None)
        return tuple(sorted(set(self.sizes)))

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


def find_sharing_problem(size: int, place: Place) -> RuleError | None:
    """Return why sequences cannot be spread over `size` devices; None if they can."""
    field, asked = "context_parallel.sizes", place.asked.context_parallel
    if place.num_devices % size:
        return RuleError(f"{size} does not divide num_devices ({place.num_devices})", field, "num_devices")
    groups = place.groups_of(size)
    named = f"num_devices ({groups})" if size == 1 else f"the number of groups of {size} devices ({groups})"
    if MICRO_BATCH_SIZE.divides_batch(place) and place.batch_size % groups:
        below = place.batch_size // groups * groups
        return RuleError(
            f"batch_size ({place.batch_size}) must be a multiple of {named}, so that each gets as much; the nearest "
            f"are {' and '.join(str(near) for near in (below, below + groups) if near)}",
            *((field,) if size > 1 else ()),
            *("batch_size", "num_devices"),
        )
    if size > 1 and not asked.layouts_over(size, place.seq_length):
        reasons = [refuse_layout(name, size, place.seq_length) for name in asked.layouts]
        return RuleError("; ".join(filter(None, reasons)), field, "context_parallel.layouts")
    return None


@dataclass(frozen=True, slots=True)
class CausalPairs:
    """Numbers of pairs of a query and a key, for one head of one sequence."""

    attended: int
    """Pairs below the causal diagonal. A fused kernel computes these alone."""
    scored: int
    """All pairs of the blocks that hold an attended pair. An implementation without such a kernel computes all of them.
    """


def busiest_pairs(sharing: Sharing, seq_length: int) -> CausalPairs:
    """Return the pairs of the busiest device, for which the others wait in every step of the ring.

    A device has L = S / N tokens. The last device of `ring` attends to all of N - 1 blocks and to half of its own. A
    device of `striped` attends to half of each block. A device of `zigzag` attends to half of its own block. Of every
    other block it attends to half, too: one half of each is older than one of the device's two pieces.
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
    """The way in which the devices of a candidate share sequences."""

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
    """The field of a request about devices that share sequences."""

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


class ContextParallel(Dimension):
    """The numbers of devices that a profiler has, each with the layouts that the sequence length admits."""

    def considered(self, place: Place) -> tuple[Sharing, ...]:
        """Return the sizes with their layouts; a sequence on one device has none."""
        sharings: list[Sharing] = []
        for size in place.asked.context_parallel.sizes_at(place):
            layouts = place.asked.context_parallel.layouts_over(size, place.seq_length)
            sharings += [ALONE] if size == 1 else [Sharing(size, layout) for layout in layouts]
        return tuple(sharings)

    def asked_of_trainer(self, candidate: Candidate, place: Place) -> Sharing:
        """Return the number of devices a sequence, with their layout."""
        return Sharing(candidate.context_parallel_size, candidate.context_parallel_layout)

    def check(self, place: Place) -> None:
        """Check that the devices, the batch and the sequence length admit the sizes."""
        asked = place.asked.context_parallel.sizes
        sizes = ((1,) if not self.considered(place) else ()) if asked == "explore" else asked
        problems = (find_sharing_problem(size, place) for size in sizes)
        if (problem := next(filter(None, problems), None)) is not None:
            raise problem

    def relaxations(self, place: ReportedPlace) -> Iterable[Change]:
        """Yield larger numbers of devices a sequence, up to those of the profiler."""
        asked = place.asked.context_parallel
        for size in divisors(place.num_devices):
            if max(asked.sizes_at(place)) < size <= place.report.hardware.num_devices:
                words = f"{size} devices a sequence (context_parallel sizes [{size}])"
                yield Change(words, {"context_parallel": asked.model_copy(update={"sizes": (size,)})})

    def column(self, place: ReportedPlace) -> Column:
        """Return the ways to share that have devices and kernels, each with the micro-batches that it divides."""
        attention = usable_attention(place.asked, place.report, place.model.place)
        sharings = self._served(attention, place)
        if not sharings:
            raise EmptySpaceError(_why_none(attention, place))
        sizes = {sharing.size: MICRO_BATCH_SIZE.considered_over(sharing.size, place) for sharing in sharings}
        if not any(sizes.values()):
            raise EmptySpaceError(
                f"no micro_batch_size divides what {max(sizes)} devices get of batch_size ({place.batch_size}), and "
                "this worker's profiler has no more that could share sequences"
            )
        return lambda known: [_point(one) for one in sharings if known["micro_batch_size"] in sizes[one.size]]

    def bases(self, place: ReportedPlace) -> Column:
        """Return the numbers of devices a sequence, from the fewest, in the plainest layout of each."""
        kernels = [backend.name for backend in place.report.attention_backends]
        plainest: dict[int, Sharing] = {}
        for sharing in self._served(kernels, place):
            plainest.setdefault(sharing.size, sharing)
        points = [_point(sharing) for sharing in plainest.values()]
        return lambda known: points

    def _served(self, attention: Sequence[str], place: ReportedPlace) -> list[Sharing]:
        """Return the ways to share for which the profiler has devices, and one of these attention kernels."""
        most = place.report.hardware.num_devices if serving(attention, place.report) else 1
        return [sharing for sharing in self.considered(place) if sharing.size <= most]


def _point(sharing: Sharing) -> Point:
    return {"context_parallel_size": sharing.size, "context_parallel_layout": sharing.layout}


def _why_none(attention: Collection[str], place: ReportedPlace) -> str:
    """Return why devices cannot share sequences with these attention kernels."""
    size, num_devices = min(place.asked.context_parallel.sizes_at(place)), place.report.hardware.num_devices
    if size > num_devices:
        return f"sequences shared by {size} devices need as many; this worker's profiler has {num_devices}"
    asked = [backend for backend in place.report.attention_backends if backend.name in attention]
    reasons = "; ".join(f"{b.name}: {b.context_parallel_reason or 'it does not say why'}" for b in asked)
    return f"no attention back end serves context parallelism on this device ({reasons})"


CONTEXT_PARALLEL = ContextParallel(
    name="context_parallel",
    fields=("context_parallel_size", "context_parallel_layout"),
    asked="context_parallel",
    term=Term(
        lambda sharing, _: f"{sharing.size} devices that share each sequence in layout '{sharing.layout}'",
        lambda sharing: unless_null(sharing.layout),
    ),
    label=_label,
    row=_row,
)
