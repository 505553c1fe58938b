"""One point of the search space."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from explorer.spec.base import Frozen
from explorer.spec.model import LayerKind, ModelSpec
from explorer.spec.training import Sharding


class Recompute(StrEnum):
    """Which activations are recomputed in backward (Korthikanti et al., 2022, arXiv:2205.05198).

    By operation, in every layer, cheapest first:
    `selective` recomputes the attention core.
    `activations` keeps the results of matrix products and of attention and recomputes what lies between them: norms,
    activations and their products with the gate, the gathering of tokens for experts. Expert GEMMs are not run again.
    `qkv` recomputes the norm, the projection of queries, keys and values, and their rotation; attention's result and
    log-sum-exp are kept, so that the attention kernel does not run again.
    `experts` recomputes the expert FFN up to its second GEMM, which nothing in backward asks for.
    `projections` is `qkv`, and the same for every FFN: only the results of attention and of blocks are kept.

    By layer: `partial_*` recomputes whole layers, that share of them; `full` every layer.
    """

    NONE = "none"
    SELECTIVE = "selective"
    ACTIVATIONS = "activations"
    QKV = "qkv"
    EXPERTS = "experts"
    PROJECTIONS = "projections"
    PARTIAL_25 = "partial_25"
    PARTIAL_50 = "partial_50"
    PARTIAL_75 = "partial_75"
    FULL = "full"

    @property
    def by_operation(self) -> bool:
        """Whether what is kept is chosen operation by operation, rather than by kernel or layer."""
        return self in {Recompute.ACTIVATIONS, Recompute.QKV, Recompute.EXPERTS, Recompute.PROJECTIONS}

    @property
    def untiled_only(self) -> bool:
        """Whether the policy says what of attention is kept; a tile, which recomputes all of it, contradicts that."""
        return self in {Recompute.SELECTIVE, Recompute.QKV, Recompute.PROJECTIONS}

    @property
    def layer_share(self) -> float:
        """Share of the layers that are recomputed as a whole."""
        return {
            Recompute.PARTIAL_25: 0.25,
            Recompute.PARTIAL_50: 0.5,
            Recompute.PARTIAL_75: 0.75,
            Recompute.FULL: 1.0,
        }.get(self, 0.0)


class Candidate(Frozen):
    """What a trainer can choose for a given model and device.

    `bta_tile` is the number of sequences of an attention tile, null for no tiling. `expert_backend` is null for a
    model without experts. `context_parallel_size` devices share each sequence, `context_parallel_layout` says which
    of them holds which tokens; null if each sequence has a device to itself. `sharding` is null unless the
    request has `sharding_levels`.
    """

    micro_batch_size: Annotated[int, Field(ge=1)]
    bta_tile: Annotated[int, Field(ge=1)] | None = None
    recompute: Recompute = Recompute.NONE
    attention_backend: str
    expert_backend: str | None = None
    num_query_groups: Annotated[int, Field(ge=1)] = Field(description="Of the model variant this candidate is for.")
    context_parallel_size: Annotated[int, Field(ge=1)] = 1
    context_parallel_layout: str | None = None
    sharding: Sharding | None = Field(None, description="Null: the request's training.sharding.")
    loss: str | None = Field(None, description="Null: the request's training.loss.")

    @model_validator(mode="after")
    def _layout_of_several(self) -> Self:
        if (self.context_parallel_layout is None) is not (self.context_parallel_size == 1):
            raise ValueError("a context_parallel_layout belongs to a context_parallel_size above 1, and to no other")
        return self

    def describe(self) -> str:
        """One line for a person: `micro_batch_size=8 bta_tile=2 recompute=none attention=flash experts=bmm`."""
        parts = [
            f"micro_batch_size={self.micro_batch_size}",
            f"bta_tile={self.bta_tile or 'off'}",
            f"recompute={self.recompute}",
            f"attention={self.attention_backend}",
        ]
        if self.expert_backend is not None:
            parts.append(f"experts={self.expert_backend}")
        if self.context_parallel_layout is not None:
            parts.append(f"context_parallel={self.context_parallel_size}:{self.context_parallel_layout}")
        if self.sharding is not None:
            parts.append(f"sharding={self.sharding}")
        if self.loss is not None:
            parts.append(f"loss={self.loss}")
        return " ".join(parts)


def recomputed_layers(model: ModelSpec, recompute: Recompute) -> tuple[bool, ...]:
    """For each layer, whether `recompute` recomputes it as a whole.

    The recomputed layers are spread evenly over each kind of layer, so that a partial policy means the same share of
    dense and of expert layers; at least one layer is recomputed by any partial policy.
    """
    share = recompute.layer_share
    kinds = model.layer_kinds
    chosen = [False] * len(kinds)
    for kind in LayerKind:
        indices = [i for i, k in enumerate(kinds) if k is kind]
        count = round(share * len(indices))
        if share > 0 and indices:
            count = max(1, count)
        for j in range(count):
            chosen[indices[j * len(indices) // count]] = True
    return tuple(chosen)
