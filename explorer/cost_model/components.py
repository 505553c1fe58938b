"""A model's step as a sum of components, each of which is timed once and shared between candidates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from explorer.cost_model.layer_groups import EqualLayers, Kind, group_chunks, group_layers
from explorer.spec.base import Frozen
from explorer.spec.candidate import Candidate, Recompute, recomputed_layers
from explorer.spec.model import LayerKind, ModelSpec
from explorer.spec.training import Sharding


class ComponentKind(StrEnum):
    """A part of a training step that is built and timed by itself.

    The reference layers consist of embedding, attention, FFN and head. A model of another target consists of `shell`,
    which is everything but its decoder layers, and `layer`.
    """

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    DENSE_FFN = "dense_ffn"
    MOE_FFN = "moe_ffn"
    HEAD = "head"
    SHELL = "shell"
    LAYER = "layer"
    OPTIMIZER = "optimizer"
    COMMUNICATION = "communication"
    EXCHANGE = "exchange"


class BlockRecompute(StrEnum):
    """What one block recomputes in backward.

    `none` recomputes nothing, `selective` the attention core, and `full` the whole block. `activations` recomputes
    everything but matrix products, attention and routing. `projections` also recomputes the first matrix product: that
    of queries, keys and values, or that into the FFN's hidden size. `to_the_end` recomputes the whole block and, unlike
    `full`, also the results at its end that only later layers need: those of the same chunk run again from them.
    """

    NONE = "none"
    SELECTIVE = "selective"
    ACTIVATIONS = "activations"
    PROJECTIONS = "projections"
    FULL = "full"
    TO_THE_END = "to_the_end"

    @property
    def by_operation(self) -> bool:
        """Whether some operations of the block run again and others do not."""
        return self is BlockRecompute.ACTIVATIONS or self is BlockRecompute.PROJECTIONS

    @property
    def is_whole(self) -> bool:
        """Whether the whole block runs again."""
        return self is BlockRecompute.FULL or self is BlockRecompute.TO_THE_END


_BLOCKS: dict[Recompute, dict[ComponentKind, BlockRecompute]] = {
    Recompute.SELECTIVE: {ComponentKind.ATTENTION: BlockRecompute.SELECTIVE},
    Recompute.ACTIVATIONS: {
        ComponentKind.ATTENTION: BlockRecompute.ACTIVATIONS,
        ComponentKind.DENSE_FFN: BlockRecompute.ACTIVATIONS,
        ComponentKind.MOE_FFN: BlockRecompute.ACTIVATIONS,
    },
    Recompute.QKV: {ComponentKind.ATTENTION: BlockRecompute.PROJECTIONS},
    Recompute.EXPERTS: {ComponentKind.MOE_FFN: BlockRecompute.PROJECTIONS},
    Recompute.PROJECTIONS: {
        ComponentKind.ATTENTION: BlockRecompute.PROJECTIONS,
        ComponentKind.DENSE_FFN: BlockRecompute.PROJECTIONS,
        ComponentKind.MOE_FFN: BlockRecompute.PROJECTIONS,
    },
}


def block_recompute(recompute: Recompute, kind: ComponentKind, bta_tile: int | None) -> BlockRecompute:
    """Return what a policy recomputes of one block, in a layer that is not recomputed as a whole.

    A tile recomputes its attention already, so a policy by operation has nothing to do in a tiled block.
    """
    asked = _BLOCKS.get(recompute, {}).get(kind, BlockRecompute.NONE)
    return BlockRecompute.NONE if asked.by_operation and bta_tile is not None else asked


def whole_recompute(recompute: Recompute) -> BlockRecompute:
    """Return how a policy recomputes the last block of a layer that it recomputes as a whole."""
    return BlockRecompute.FULL if recompute.group_size is None else BlockRecompute.TO_THE_END


class Operation(StrEnum):
    """What devices of a mesh do to exchange something.

    In `all_to_all` the first device gets twice the bytes of any other. In `send` each device sends to the next.
    """

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    SEND = "send"


class ExchangeSpec(Frozen):
    """An operation of groups of `size` devices, `stride` apart, which run it at the same time.

    `num_bytes` are those that a device has after it has gathered, or before it scatters; those that it sends; or, in
    `all_to_all`, those that the first device receives, with its own.
    """

    operation: Operation
    size: Annotated[int, Field(ge=2)]
    stride: Annotated[int, Field(ge=1)]
    num_bytes: Annotated[int, Field(ge=1)]


def _is_null(value: object) -> bool:
    return value is None


def _is_one(size: int) -> bool:
    """Most components are stored without the sizes of a mesh."""
    return size == 1


def _is_zero(number: int) -> bool:
    return number == 0


class Component(Frozen):
    """One block of the model under one setting; equal components of different candidates are measured once.

    `micro_batch_size` is 0 for the optimizer and for the communication of gradients and parameters, which do not depend
    on it. A device has the share 1 / `context_parallel_size` of each sequence. Only attention reaches beyond that
    share, so only attention depends on the layout. `sharding` is set for optimizer and communication if the level may
    be chosen. For the optimizer it is `none` or `zero1`, because higher levels leave it the same share.

    In a plan a device has 1 / `tensor_parallel_size` of a block, or one of the `expert_parallel_size` shares of the
    experts, with one of `overlap_degree` chunks of its rows, and beside copies of the `shadowed_experts`: see
    `explorer.cost_model.shards`.

    `part` names the kind of a `layer`. The `backend` of a layer names attention and experts, as in `sdpa+grouped_mm`;
    that of a `shell` names the loss, or the target's own choice for a model that is measured whole.
    """

    kind: ComponentKind
    part: str | None = None
    micro_batch_size: Annotated[int, Field(ge=0)]
    bta_tile: int | None = None
    recompute: BlockRecompute = BlockRecompute.NONE
    backend: str | None = None
    num_query_groups: int | None = None
    context_parallel_size: Annotated[int, Field(ge=1)] = 1
    context_parallel_layout: str | None = None
    sharding: Sharding | None = None
    overlap_degree: Annotated[int, Field(ge=1)] = Field(1, exclude_if=_is_one)
    shadowed_experts: Annotated[int, Field(ge=0)] = Field(0, exclude_if=_is_zero)
    tensor_parallel_size: Annotated[int, Field(ge=1)] = Field(1, exclude_if=_is_one)
    expert_parallel_size: Annotated[int, Field(ge=1)] = Field(1, exclude_if=_is_one)
    exchange: ExchangeSpec | None = Field(None, exclude_if=_is_null)

    @model_validator(mode="after")
    def _layout_of_attention(self) -> Self:
        spread = self.kind is ComponentKind.ATTENTION and self.context_parallel_size > 1
        if (self.context_parallel_layout is None) is spread:
            raise ValueError("a context_parallel_layout belongs to attention with a context_parallel_size above 1")
        return self

    @property
    def sequences(self) -> float:
        """Tokens that a device has, in whole sequences."""
        return self.micro_batch_size / self.context_parallel_size

    @property
    def communicates(self) -> bool:
        """Whether several processes, which share sequences, compute it together."""
        return self.context_parallel_layout is not None

    @property
    def is_joint(self) -> bool:
        """Whether it needs several processes, which share sequences or exchange gradients and parameters."""
        return self.communicates or self.kind in {ComponentKind.COMMUNICATION, ComponentKind.EXCHANGE}

    @property
    def key(self) -> str:
        """A text that names the component, unique within a job."""
        parts = [] if self.part is None else [self.part]
        if self.micro_batch_size:
            parts.append(f"m={self.micro_batch_size}")
        if self.bta_tile is not None:
            parts.append(f"tile={self.bta_tile}")
        if self.recompute is not BlockRecompute.NONE:
            parts.append(f"recompute={self.recompute}")
        if self.backend is not None:
            parts.append(self.backend)
        if self.num_query_groups is not None:
            parts.append(f"groups={self.num_query_groups}")
        if self.context_parallel_size > 1:
            layout = "" if self.context_parallel_layout is None else f":{self.context_parallel_layout}"
            parts.append(f"cp={self.context_parallel_size}{layout}")
        if self.tensor_parallel_size > 1:
            parts.append(f"tp={self.tensor_parallel_size}")
        if self.expert_parallel_size > 1:
            parts.append(f"ep={self.expert_parallel_size}")
        if self.overlap_degree > 1:
            parts.append(f"chunks={self.overlap_degree}")
        if self.shadowed_experts:
            parts.append(f"shadowed={self.shadowed_experts}")
        if self.sharding is not None:
            parts.append(str(self.sharding))
        if self.exchange is not None:
            told = self.exchange
            parts.append(f"{told.operation},{told.size}x{told.stride},{told.num_bytes}")
        return f"{self.kind}({','.join(parts)})"


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

    `embedding` is null if the head stands for the whole shell. `optimizer` is null in eval mode. `communication` is
    null if devices exchange nothing, or if the worker has too few devices to time it.
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


def equal_layers(
    kinds: Sequence[Kind], recompute: Recompute, recomputed: Sequence[bool]
) -> tuple[EqualLayers[Kind], ...]:
    """Return a model's layers in groups; `recomputed` says of each whether `recompute` recomputes it as a whole."""
    if recompute.group_size is not None:
        return group_chunks(kinds, recompute.group_size)
    return group_layers(kinds, recomputed)


def stepped_level(candidate: Candidate) -> Sharding | None:
    """Return the `sharding` of the optimizer's component."""
    return None if candidate.sharding is None else min(candidate.sharding, Sharding.ZERO1, key=lambda one: one.level)


class Decomposer:
    """Splits the steps of one model's candidates into components, sharing equal components.

    Every block but attention works token by token. Half of each of two sequences is the same work as one whole
    sequence, so both are one component. With `exchanges`, the steps contain the exchange of gradients and parameters.
    """

    def __init__(self, model: ModelSpec, *, training: bool, exchanges: bool = False) -> None:
        self._model = model
        self._training = training
        self._exchanges = exchanges
        self._components: dict[tuple[object, ...], Component] = {}
        self._groups: dict[Recompute, tuple[EqualLayers[LayerKind], ...]] = {}

    def __call__(self, candidate: Candidate) -> Decomposition:
        """Return the components of one step of `candidate`."""
        m = candidate.micro_batch_size
        groups = candidate.num_query_groups
        size, layout = candidate.context_parallel_size, candidate.context_parallel_layout
        common = math.gcd(m, size)
        local = (m // common, size // common)
        layers = []
        for equal in self._layer_groups(candidate.recompute):
            moe = equal.kind is LayerKind.MOE
            ffn_kind = ComponentKind.MOE_FFN if moe else ComponentKind.DENSE_FFN
            core = BlockRecompute.FULL  # the FFN follows, so that attention runs to its end in any case
            again = whole_recompute(candidate.recompute)
            if not equal.recomputed:
                core = block_recompute(candidate.recompute, ComponentKind.ATTENTION, candidate.bta_tile)
                again = block_recompute(candidate.recompute, ffn_kind, None)
            attention = self._share(
                ComponentKind.ATTENTION, m, candidate.bta_tile, core, candidate.attention_backend, groups, size, layout
            )
            backend = candidate.expert_backend if moe else None
            ffn = self._share(ffn_kind, local[0], None, again, backend, None, local[1])
            layers.append(LayerGroup(equal, (attention, ffn)))
        plain = (None, BlockRecompute.NONE, None)
        return Decomposition(
            embedding=self._share(ComponentKind.EMBEDDING, local[0], *plain, None, local[1]),
            layers=tuple(layers),
            head=self._share(ComponentKind.HEAD, local[0], *plain, None, local[1]),
            optimizer=(
                self._share(ComponentKind.OPTIMIZER, 0, *plain, groups, sharding=stepped_level(candidate))
                if self._training
                else None
            ),
            communication=(
                self._share(ComponentKind.COMMUNICATION, 0, *plain, groups, sharding=candidate.sharding)
                if self._exchanges
                else None
            ),
        )

    def _layer_groups(self, recompute: Recompute) -> tuple[EqualLayers[LayerKind], ...]:
        if recompute not in self._groups:
            chosen = recomputed_layers(self._model, recompute)
            self._groups[recompute] = equal_layers(self._model.layer_kinds, recompute, chosen)
        return self._groups[recompute]

    def _share(
        self,
        kind: ComponentKind,
        micro_batch_size: int,
        bta_tile: int | None,
        recompute: BlockRecompute,
        backend: str | None,
        num_query_groups: int | None,
        context_parallel_size: int = 1,
        context_parallel_layout: str | None = None,
        sharding: Sharding | None = None,
    ) -> Component:
        arguments = (
            kind,
            micro_batch_size,
            bta_tile,
            recompute,
            backend,
            num_query_groups,
            context_parallel_size,
            context_parallel_layout,
            sharding,
        )
        if arguments not in self._components:
            self._components[arguments] = Component(
                kind=kind,
                micro_batch_size=micro_batch_size,
                bta_tile=bta_tile,
                recompute=recompute,
                backend=backend,
                num_query_groups=num_query_groups,
                context_parallel_size=context_parallel_size,
                context_parallel_layout=context_parallel_layout,
                sharding=sharding,
            )
        return self._components[arguments]
