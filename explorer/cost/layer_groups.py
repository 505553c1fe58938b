"""The layers of a model as groups of equal ones, each with its worst place in a step's memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Kind = TypeVar("Kind", bound=str)


@dataclass(frozen=True, slots=True)
class EqualLayers(Generic[Kind]):
    """Equal layers of a model, which are all recomputed as a whole or not.

    The worst layer is the one whose backward pass has most in memory, such as the last in the model. The two tuples
    have an entry for every group, in order.
    """

    kind: Kind
    recomputed: bool
    count: int
    """The number of these layers."""
    below: tuple[int, ...]
    """The layers of each group whose results of forward are in memory when the worst layer runs backward.

    These results are an output if the layer is recomputed, else all that its backward pass needs.
    """
    kept: int
    """The layers that leave results at the end of forward.

    These are all, unless layers are recomputed together. Then only the last layer of each such chunk leaves its output,
    which is the next chunk's input.
    """
    together: tuple[int, ...]
    """The layers of each group that run again together with the worst layer, with all their tensors in memory."""


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
            together=(0,) * len(counts),
        )
        for sort, count in counts
    )


def group_chunks(kinds: Sequence[Kind], size: int) -> tuple[EqualLayers[Kind], ...]:
    """Return the groups of a model's layers if each chunk of `size` layers runs again as one.

    Layers are equal here if their chunks have the same kinds of layers in the same order. The worst layer of a group is
    the last of its kind in the last such chunk, because most outputs are in memory below it.
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
                together=tuple(before.count(of) if other == chunk else 0 for of, other in sorts),
            )
        )
    return tuple(groups)
