"""A model's step as a sum of components, and its layers in groups of equal ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from bexp.explorer.cost.components import (
    BackEnd,
    BlockRecompute,
    Component,
    ComponentKind,
    block_recompute,
    marks_of,
    whole_recompute,
)
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.dimension import CodePart
from bexp.explorer.dimensions.recompute import Recompute, recomputed_layers
from bexp.explorer.model.model import LayerKind
from bexp.explorer.model.parts import ExploredModel, ModelParts
from bexp.explorer.model.training import Sharding

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


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Equal layers of a model with the blocks that run one after another in each of them.

    The blocks are attention and FFN of a reference layer, or one layer that is measured as a whole.
    """

    layers: EqualLayers[Any]
    blocks: tuple[Component, ...]


@dataclass(frozen=True, slots=True)
class Decomposition:
    """The components of a candidate's step.

    `embedding` is None if the head stands for the whole shell. `optimizer` is None in eval mode. `communication` is
    None if devices exchange nothing, or if the worker has too few devices to time it.
    """

    embedding: Component | None
    layers: tuple[LayerGroup, ...]
    head: Component
    optimizer: Component | None
    communication: Component | None = None

    @property
    def step(self) -> list[Component]:
        """The components in the order of a step; groups of layers may share some."""
        blocks = [block for group in self.layers for block in group.blocks]
        step = [self.embedding, *blocks, self.head, self.optimizer, self.communication]
        return [component for component in step if component is not None]

    @property
    def components(self) -> tuple[Component, ...]:
        """Every distinct component, in the order of a step."""
        return tuple(dict.fromkeys(self.step))


_BY_OPERATION = {
    Recompute.SELECTIVE: BlockRecompute.SELECTIVE,
    Recompute.ACTIVATIONS: BlockRecompute.ACTIVATIONS,
    Recompute.PROJECTIONS: BlockRecompute.PROJECTIONS,
    Recompute.OFFLOAD: BlockRecompute.OFFLOAD,
}
"""The recomputation of a whole layer by policies that recompute none as a whole."""


class Decomposer:
    """Splits the steps of one model's candidates into components, sharing equal components.

    A reference layer is attention and FFN. Every block but attention works token by token. Half of each of two
    sequences is the same work as one whole sequence, so both are one component. The step of a model that a target
    describes by its parts is its shell, its layers and the optimizer. With `communicates`, the steps contain the
    exchange of gradients and parameters between devices.
    """

    def __init__(self, model: ExploredModel, *, training: bool, communicates: bool = False) -> None:
        self._model = model
        self._training = training
        self._communicates = communicates and model.num_layers > 0  # a model without layers is whole, on one device
        self._built: dict[tuple[tuple[str, Any], ...], Component] = {}
        self._groups: dict[Recompute, tuple[EqualLayers[Any], ...]] = {}

    def __call__(self, candidate: Candidate) -> Decomposition:
        """Return the components of one step of `candidate`."""
        groups, marks = self._layer_groups(candidate.recompute), marks_of(candidate, CodePart.LAYER)
        whole: dict[str, Any] = {"micro_batch_size": 0}
        if isinstance(self._model, ModelParts):
            layers = [LayerGroup(equal, (self._layer(self._model, equal, candidate, marks),)) for equal in groups]
            backend = candidate.settings or "+".join(marks_of(candidate, CodePart.SHELL)) or None
            size = candidate.micro_batch_size
            embedding, head = None, self._share(kind=ComponentKind.SHELL, micro_batch_size=size, backend=backend)
        else:
            local = _local(candidate)
            layers = [LayerGroup(equal, self._blocks(equal, candidate, marks, local)) for equal in groups]
            embedding = self._share(kind=ComponentKind.EMBEDDING, **local)
            head = self._share(kind=ComponentKind.HEAD, **local)
            whole["num_query_groups"] = candidate.num_query_groups
        optimizer = communication = None
        if self._training:
            level = candidate.sharding and min(candidate.sharding, Sharding.ZERO1, key=lambda one: one.level)
            optimizer = self._share(kind=ComponentKind.OPTIMIZER, **whole, sharding=level)
        if self._communicates:
            communication = self._share(kind=ComponentKind.COMMUNICATION, **whole, sharding=candidate.sharding)
        return Decomposition(embedding, tuple(layers), head, optimizer, communication)

    def _blocks(
        self, equal: EqualLayers[LayerKind], candidate: Candidate, marks: tuple[str, ...], local: dict[str, int]
    ) -> tuple[Component, Component]:
        """Return attention and FFN of equal reference layers."""
        moe = equal.kind is LayerKind.MOE
        ffn_kind = ComponentKind.MOE_FFN if moe else ComponentKind.DENSE_FFN
        core = BlockRecompute.FULL  # the FFN follows, so that attention runs to its end in any case
        again = whole_recompute(candidate.recompute)
        if not equal.recomputed:
            core = block_recompute(candidate.recompute, ComponentKind.ATTENTION, candidate.bta_tile)
            again = block_recompute(candidate.recompute, ffn_kind, None)
        attention = self._share(
            kind=ComponentKind.ATTENTION,
            micro_batch_size=candidate.micro_batch_size,
            bta_tile=candidate.bta_tile,
            recompute=core,
            backend=BackEnd(attention=candidate.attention_backend, marks=marks),
            num_query_groups=candidate.num_query_groups,
            context_parallel_size=candidate.context_parallel_size,
            context_parallel_layout=candidate.context_parallel_layout,
        )
        plain = BackEnd(marks=marks) if marks else None  # where there is a choice, layers alone are compiled
        ffn = self._share(
            kind=ffn_kind,
            **local,
            recompute=again,
            backend=BackEnd(experts=candidate.expert_backend, marks=marks) if moe else plain,
            capacity_factor=candidate.capacity_factor if moe else None,
        )
        return attention, ffn

    def _layer(
        self, parts: ModelParts, equal: EqualLayers[str], candidate: Candidate, marks: tuple[str, ...]
    ) -> Component:
        experts = candidate.expert_backend if parts.kind(equal.kind).has_experts else None
        again = _BY_OPERATION.get(candidate.recompute, BlockRecompute.NONE)
        return self._share(
            kind=ComponentKind.LAYER,
            micro_batch_size=candidate.micro_batch_size,
            part=equal.kind,
            backend=BackEnd(candidate.attention_backend, experts, marks),
            recompute=whole_recompute(candidate.recompute) if equal.recomputed else again,
            bta_tile=candidate.bta_tile,
        )

    def _layer_groups(self, recompute: Recompute) -> tuple[EqualLayers[Any], ...]:
        if recompute not in self._groups:
            model = self._model
            kinds = model.layers if isinstance(model, ModelParts) else model.layer_kinds
            if recompute.group_size is not None:
                self._groups[recompute] = group_chunks(kinds, recompute.group_size)
            else:
                self._groups[recompute] = group_layers(kinds, recomputed_layers(model, recompute))
        return self._groups[recompute]

    def _share(self, **fields: Any) -> Component:
        """Return the component with these fields; the same ones give the same object, because validation takes long."""
        key = tuple(fields.items())
        if key not in self._built:
            self._built[key] = Component(**fields)
        return self._built[key]


def _local(candidate: Candidate) -> dict[str, int]:
    """Return the size of a block that works token by token, in lowest terms."""
    common = math.gcd(candidate.micro_batch_size, candidate.context_parallel_size)
    return {
        "micro_batch_size": candidate.micro_batch_size // common,
        "context_parallel_size": candidate.context_parallel_size // common,
    }
