"""What a candidate or a component of the search sets on a model."""

from __future__ import annotations

from typing import cast

from bexp.explorer.cost.components import BlockRecompute, Component, ComponentKind
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.kernels import Kernels
from bexp.explorer.dimensions.loss import LOSS, Loss
from bexp.explorer.request.request import ExplorationRequest
from bexp.transformers.settings import ON_HOST, Float8, Settings

BY_OPERATION = {
    BlockRecompute.SELECTIVE: "selective",
    BlockRecompute.ACTIVATIONS: "activations",
    BlockRecompute.PROJECTIONS: "projections",
    BlockRecompute.OFFLOAD: ON_HOST,
}
WHOLE_LAYER = {BlockRecompute.FULL: "full", BlockRecompute.TO_THE_END: "groups_1"}
"""What recomputes a layer alone as a whole; a group runs to its end."""


def settings_of(candidate: Candidate, request: ExplorationRequest) -> Settings:
    """What a candidate sets on a whole model."""
    return Settings(
        attention=candidate.attention_backend,
        experts=candidate.expert_backend,
        recompute=candidate.recompute.value,
        bta_tile=candidate.bta_tile,
        loss=candidate.loss or LOSS.plain,
        compile=request.execution_of(candidate).compiles,
        graph=request.execution_of(candidate).replays,
        allocator=request.allocator,
        kernels="liger" if candidate.kernels is Kernels.LIGER else "library",
        float8=float8_of(request),
    )


def settings_of_component(component: Component, request: ExplorationRequest) -> Settings:
    """What a component sets on the shell or on a layer; recomputation of a layer as a whole is left out."""
    if component.kind is ComponentKind.SHELL:
        return Settings(loss=cast(Loss, component.setting or LOSS.plain))
    assert component.backend is not None, "a layer names its attention"
    return Settings(
        attention=component.attention,
        experts=component.experts,
        recompute=BY_OPERATION.get(component.recompute, "none"),
        bta_tile=component.bta_tile,
        compile=request.plain_execution.compiles or component.is_compiled,
        kernels="liger" if component.backend.liger else "library",
        float8=float8_of(request),
    )


def float8_of(request: ExplorationRequest) -> Float8 | None:
    """Return the recipe by which linear layers are computed in float8; None if they are not."""
    return cast(Float8 | None, request.training.float8_recipe)
