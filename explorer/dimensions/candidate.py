"""One point of the search space."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from bexp.explorer.dimensions.execution import Execution, Kernels
from bexp.explorer.dimensions.loss import LossOf
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.base import Frozen, RuleError, is_null
from bexp.explorer.model.model import Variant
from bexp.explorer.model.target import OWN_ATTENTION
from bexp.explorer.model.training import Sharding


class Candidate(LossOf, Frozen):
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
    capacity_factor: float | None = Field(
        None, description="That of the model variant that this candidate is for.", exclude_if=is_null
    )
    context_parallel_size: Annotated[int, Field(ge=1)] = 1
    context_parallel_layout: str | None = None
    sharding: Sharding | None = Field(None, description="Null: the request's training.sharding.")
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
    def variant(self) -> Variant:
        """The model variant that it is for."""
        return Variant(self.num_query_groups, self.capacity_factor)

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


DIMENSIONS = tuple(name for name in Candidate.model_fields if name not in Variant._fields)
"""The fields of a candidate that a space varies; the others tell model variants apart."""
