"""A model's step as a sum of components: what is timed once and shared between candidates."""

from __future__ import annotations

from collections import Counter
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


class LayerGroup(Frozen):
    """`count` equal layers: an attention block followed by an FFN block, recomputed as a whole or not."""

    count: int
    attention: Component
    ffn: Component
    recomputed: bool


class Decomposition(Frozen):
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


def decompose(model: ModelSpec, candidate: Candidate, *, training: bool) -> Decomposition:
    """Split the step of `candidate` into components."""
    m = candidate.micro_batch_size

    def attention(recomputed: bool) -> Component:
        if recomputed:
            recompute = BlockRecompute.FULL
        elif candidate.recompute is Recompute.SELECTIVE:
            recompute = BlockRecompute.SELECTIVE
        else:
            recompute = BlockRecompute.NONE
        return Component(
            kind=ComponentKind.ATTENTION,
            micro_batch_size=m,
            bta_tile=candidate.bta_tile,
            recompute=recompute,
            backend=candidate.attention_backend,
            num_query_groups=candidate.num_query_groups,
        )

    def ffn(kind: LayerKind, recomputed: bool) -> Component:
        moe = kind is LayerKind.MOE
        return Component(
            kind=ComponentKind.MOE_FFN if moe else ComponentKind.DENSE_FFN,
            micro_batch_size=m,
            recompute=BlockRecompute.FULL if recomputed else BlockRecompute.NONE,
            backend=candidate.expert_backend if moe else None,
        )

    groups = Counter(zip(model.layer_kinds, recomputed_layers(model, candidate.recompute), strict=True))
    return Decomposition(
        embedding=Component(kind=ComponentKind.EMBEDDING, micro_batch_size=m),
        layers=tuple(
            LayerGroup(count=count, attention=attention(again), ffn=ffn(kind, again), recomputed=again)
            for (kind, again), count in sorted(groups.items())
        ),
        head=Component(kind=ComponentKind.HEAD, micro_batch_size=m),
        optimizer=Component(
            kind=ComponentKind.OPTIMIZER, micro_batch_size=0, num_query_groups=candidate.num_query_groups
        )
        if training
        else None,
    )
