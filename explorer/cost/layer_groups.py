"""The layers of a model as groups of equal ones, of which each has its worst place in a step's memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Kind = TypeVar("Kind", bound=str)


@dataclass(frozen=True, slots=True)
class EqualLayers(Generic[Kind]):
    """Equal layers of a model, `count` of them, which are all recomputed as a whole or not.

    Before the last of them that has most in memory, earlier layers have left something. The two tuples have an entry
    for every group, in order. `below` counts its layers of which the results between forward and backward are in
    memory then: an output if they are recomputed, else all that their backward pass needs. `beside` counts its layers
    that run again together with the last layer, so that all they compute is in memory. `kept` of the group's layers
    leave results at the end of forward. That is all of them unless layers are recomputed together: then only the last
    layer of each such chunk leaves its output, which is the next chunk's input.
    """

    kind: Kind
    recomputed: bool
    count: int
    below: tuple[int, ...]
    kept: int
    beside: tuple[int, ...]


def group_layers(kinds: Sequence[Kind], recomputed: Sequence[bool]) -> tuple[EqualLayers[Kind], ...]:
    """Return the groups of a model's layers, in the order of their kinds, if each layer runs again by itself."""
    layers = list(zip(kinds, recomputed, strict=True))
    counts = sorted(Counter(layers).items())
    last = {sort: len(layers) - 1 - layers[::-1].index(sort) for sort, _ in counts}
    return tuple(
        EqualLayers(
            *sort,
            count,
            below=tuple(layers[: last[sort]].count(other) for other, _ in counts),
            kept=count,
            beside=(0,) * len(counts),
        )
        for sort, count in counts
    )


def group_chunks(kinds: Sequence[Kind], size: int) -> tuple[EqualLayers[Kind], ...]:
    """Return the groups of a model's layers if each chunk of `size` layers runs again as one.

    Layers are equal here if their chunks have the same kinds of layers in the same order. The worst place of a group is
    in the last such chunk, because most outputs are below it, and in there it is the last layer of the kind.
    """
    chunks = [tuple(kinds[start : start + size]) for start in range(0, len(kinds), size)]
    last = {chunk: index for index, chunk in enumerate(chunks)}
    sorts = sorted({(kind, chunk) for chunk in last for kind in chunk})
    groups = []
    for kind, chunk in sorts:
        earlier = chunks[: last[chunk]]
        before = chunk[: len(chunk) - 1 - chunk[::-1].index(kind)]
        number = chunks.count(chunk)
        groups.append(
            EqualLayers(
                kind,
                True,
                number * chunk.count(kind),
                below=tuple(earlier.count(other) if other[-1] == of else 0 for of, other in sorts),
                kept=number if chunk[-1] == kind else 0,
                beside=tuple(before.count(of) if other == chunk else 0 for of, other in sorts),
            )
        )
    return tuple(groups)
