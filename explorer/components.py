"""A model's step as a sum of components: what is timed once and shared between candidates."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from explorer.candidates import Candidate, Recompute, recomputed_layers
from explorer.frozen import Frozen
from explorer.models import LayerKind, ModelSpec


class ComponentKind(StrEnum):
    """A part of a training step that is built and timed by itself."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    DENSE_FFN = "dense_ffn"
    MOE_FFN = "moe_ffn"
    HEAD = "head"
    OPTIMIZER = "optimizer"


class BlockRecompute(StrEnum):
    """What one block does in backward: nothing again, its attention core again, or all of it again."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class Component(Frozen):
    """One block of the model under one setting; equal components of different candidates are measured once.

    `micro_batch_size` is 0 for the optimizer, which does not depend on it.
    """

    kind: ComponentKind
    micro_batch_size: Annotated[int, Field(ge=0)]
    bta_tile: int | None = None
    recompute: BlockRecompute = BlockRecompute.NONE
    backend: str | None = None
    num_query_groups: int | None = None

    @property
    def key(self) -> str:
        """Canonical text, unique within a job."""
        parts = [f"m={self.micro_batch_size}"] if self.kind is not ComponentKind.OPTIMIZER else []
        if self.bta_tile is not None:
            parts.append(f"tile={self.bta_tile}")
        if self.recompute is not BlockRecompute.NONE:
            parts.append(f"recompute={self.recompute}")
        if self.backend is not None:
            parts.append(self.backend)
        if self.num_query_groups is not None:
            parts.append(f"groups={self.num_query_groups}")
        return f"{self.kind}({','.join(parts)})"


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """`count` equal layers: an attention block followed by an FFN block, recomputed as a whole or not.

    `below` counts, for every group in order, its layers that lie before this group's last layer.
    """

    count: int
    attention: Component
    ffn: Component
    recomputed: bool
    below: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decomposition:
    """The components of a candidate's step. `optimizer` is null in eval mode."""

    embedding: Component
    layers: tuple[LayerGroup, ...]
    head: Component
    optimizer: Component | None

    @property
    def components(self) -> tuple[Component, ...]:
        """Every distinct component, in the order of a step."""
        blocks = [block for group in self.layers for block in (group.attention, group.ffn)]
        ends = [self.optimizer] if self.optimizer is not None else []
        return tuple(dict.fromkeys([self.embedding, *blocks, self.head, *ends]))


class Decomposer:
    """Splits the steps of one model's candidates into components, sharing equal components."""

    def __init__(self, model: ModelSpec, *, training: bool) -> None:
        self._model = model
        self._training = training
        self._components: dict[tuple[object, ...], Component] = {}
        self._groups: dict[Recompute, list[tuple[LayerKind, bool, int, tuple[int, ...]]]] = {}

    def __call__(self, candidate: Candidate) -> Decomposition:
        """The components of one step of `candidate`."""
        m = candidate.micro_batch_size
        groups = candidate.num_query_groups
        selective = candidate.recompute is Recompute.SELECTIVE
        layers = []
        for kind, recomputed, count, below in self._layer_groups(candidate.recompute):
            whole = BlockRecompute.FULL if recomputed else BlockRecompute.NONE
            core = BlockRecompute.SELECTIVE if selective else whole
            attention = self._share(
                ComponentKind.ATTENTION, m, candidate.bta_tile, core, candidate.attention_backend, groups
            )
            if kind is LayerKind.MOE:
                ffn = self._share(ComponentKind.MOE_FFN, m, None, whole, candidate.expert_backend, None)
            else:
                ffn = self._share(ComponentKind.DENSE_FFN, m, None, whole, None, None)
            layers.append(LayerGroup(count, attention, ffn, recomputed, below))
        plain = (None, BlockRecompute.NONE, None)
        return Decomposition(
            embedding=self._share(ComponentKind.EMBEDDING, m, *plain, None),
            layers=tuple(layers),
            head=self._share(ComponentKind.HEAD, m, *plain, None),
            optimizer=self._share(ComponentKind.OPTIMIZER, 0, *plain, groups) if self._training else None,
        )

    def _layer_groups(self, recompute: Recompute) -> list[tuple[LayerKind, bool, int, tuple[int, ...]]]:
        if recompute not in self._groups:
            layers = list(zip(self._model.layer_kinds, recomputed_layers(self._model, recompute), strict=True))
            counts = sorted(Counter(layers).items())
            last = {sort: len(layers) - 1 - layers[::-1].index(sort) for sort, _ in counts}
            self._groups[recompute] = [
                (*sort, count, tuple(layers[: last[sort]].count(other) for other, _ in counts))
                for sort, count in counts
            ]
        return self._groups[recompute]

    def _share(
        self,
        kind: ComponentKind,
        micro_batch_size: int,
        bta_tile: int | None,
        recompute: BlockRecompute,
        backend: str | None,
        num_query_groups: int | None,
    ) -> Component:
        arguments = (kind, micro_batch_size, bta_tile, recompute, backend, num_query_groups)
        if arguments not in self._components:
            self._components[arguments] = Component(
                kind=kind,
                micro_batch_size=micro_batch_size,
                bta_tile=bta_tile,
                recompute=recompute,
                backend=backend,
                num_query_groups=num_query_groups,
            )
        return self._components[arguments]
