"""One point of the search space."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from explorer.spec.base import Frozen, RuleError
from explorer.spec.execution import Execution, Kernels
from explorer.spec.model import LayerKind, ModelSpec
from explorer.spec.target import OWN_ATTENTION
from explorer.spec.training import Sharding


class Recompute(StrEnum):
    """Which activations are recomputed in backward (Korthikanti et al., 2022, arXiv:2205.05198).

    Some policies choose by operation, in every layer. The cheapest comes first.
    `selective` recomputes the attention core.
    `activations` keeps the results of matrix products and of attention. It recomputes what lies between them: norms,
    activation functions and their products with the gate, and the gathering of tokens for experts. It does not run
    expert GEMMs again.
    `qkv` recomputes the norm, the projection of queries, keys and values, and their rotation. It keeps attention's
    result and log-sum-exp, so the attention kernel does not run again.
    `experts` recomputes the expert FFN up to its second GEMM, whose result backward does not need.
    `projections` is `qkv` with the same for every FFN: it keeps only the results of attention and of blocks.

    Others choose by layer. `partial_*` recomputes that share of the layers as a whole, and `full` every layer.
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
        """Whether the policy chooses operation by operation what to keep, rather than by kernel or layer."""
        return self in {Recompute.ACTIVATIONS, Recompute.QKV, Recompute.EXPERTS, Recompute.PROJECTIONS}

    @property
    def untiled_only(self) -> bool:
        """Whether the policy keeps a part of attention; a tile recomputes all of it, so the two exclude each other."""
        return self in {Recompute.SELECTIVE, Recompute.QKV, Recompute.PROJECTIONS}

    @property
    def layer_share(self) -> float:
        """The share of the layers that the policy recomputes as a whole."""
        return {
            Recompute.PARTIAL_25: 0.25,
            Recompute.PARTIAL_50: 0.5,
            Recompute.PARTIAL_75: 0.75,
            Recompute.FULL: 1.0,
        }.get(self, 0.0)


class Candidate(Frozen):
    """What a trainer can choose for a given model and device.

    `bta_tile` is the number of sequences of an attention tile; null is no tiling. `expert_backend` is null for a model
    without experts. `context_parallel_size` devices share each sequence, and `context_parallel_layout` says which of
    them holds which tokens; it is null if each sequence has a device to itself. `sharding` is null unless the request
    has `sharding_levels`.
    """

    micro_batch_size: Annotated[int, Field(ge=1)]
    bta_tile: Annotated[int, Field(ge=1)] | None = None
    recompute: Recompute = Recompute.NONE
    attention_backend: str
    expert_backend: str | None = None
    num_query_groups: Annotated[int, Field(ge=1)] = Field(
        description="The number in the model variant that this candidate is for."
    )
    context_parallel_size: Annotated[int, Field(ge=1)] = 1
    context_parallel_layout: str | None = None
    sharding: Sharding | None = Field(None, description="Null: the request's training.sharding.")
    loss: str | None = Field(None, description="Null: the request's training.loss.")
    execution: Execution | None = Field(None, description="Null: the request's execution.")
    kernels: Kernels | None = Field(None, description="Null: the model's own.")
    settings: str | None = Field(None, description="A choice that the target itself offers, such as `compile=true`.")

    @model_validator(mode="after")
    def _layout_of_several(self) -> Self:
        if (self.context_parallel_layout is None) is not (self.context_parallel_size == 1):
            raise RuleError(
                "a context_parallel_layout belongs to a context_parallel_size above 1, and to no other",
                "context_parallel_layout",
                "context_parallel_size",
            )
        return self

    @property
    def is_whole(self) -> bool:
        """Whether it belongs to a model that is measured whole, whose code chooses the rest by itself."""
        return self.attention_backend == OWN_ATTENTION

    def describe(self) -> str:
        """Return one line for a person: `micro_batch_size=8 bta_tile=2 recompute=none attention=flash experts=bmm`."""
        parts = [f"micro_batch_size={self.micro_batch_size}"]
        if not self.is_whole:
            parts += [
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
        if self.execution is not None:
            parts.append(f"execution={self.execution}")
        if self.kernels is not None:
            parts.append(f"kernels={self.kernels}")
        if self.settings is not None:
            parts.append(self.settings)
        return " ".join(parts)


def recomputed_layers(model: ModelSpec, recompute: Recompute) -> tuple[bool, ...]:
    """Return, for each layer, whether `recompute` recomputes it as a whole.

    The recomputed layers are spread evenly over each kind of layer, so that a partial policy means the same share of
    dense and of expert layers. Every partial policy recomputes at least one layer.
    """
    kinds = model.layer_kinds
    chosen = [False] * len(kinds)
    for kind, count in zip(LayerKind, _count_recomputed(model, recompute), strict=True):
        indices = [i for i, k in enumerate(kinds) if k is kind]
        for j in range(count):
            chosen[indices[j * len(indices) // count]] = True
    return tuple(chosen)


def _count_recomputed(model: ModelSpec, recompute: Recompute) -> tuple[int, ...]:
    """Return how many layers of each kind `recompute` recomputes as a whole."""
    share = recompute.layer_share
    counts = [model.count_layers(kind) for kind in LayerKind]
    return tuple(max(1, round(share * count)) if share > 0 and count else 0 for count in counts)


def distinct_policies(model: ModelSpec | None, allowed: Collection[Recompute]) -> tuple[Recompute, ...]:
    """Return the policies of `allowed` without those that recompute the same layers as another.

    In a shallow model some shares round to the same layers. One of them is enough, and `full` goes before a part.
    Policies that recompute equally many layers of each kind recompute the same ones, so no layer is looked at here: a
    request is checked in a time that does not grow with its number of layers.
    """
    if model is None:
        return tuple(policy for policy in Recompute if policy in allowed)
    distinct: dict[object, Recompute] = {}
    for policy in sorted(allowed, key=lambda p: p is not Recompute.FULL):
        counts = _count_recomputed(model, policy)
        distinct.setdefault(counts if any(counts) else policy, policy)
    return tuple(policy for policy in Recompute if policy in distinct.values())
