"""What a candidate or a component of the search sets on a model."""

from __future__ import annotations

from typing import cast

from bexp.explorer.cost.components import BackEnd, BlockRecompute, Component, ComponentKind, marked_values
from bexp.explorer.dimensions.candidate import CHOICES, Candidate
from bexp.explorer.dimensions.dimension import CodePart
from bexp.explorer.dimensions.execution import EXECUTION
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.request.request import ExplorationRequest
from bexp.transformers.settings import Float8, Settings

BY_OPERATION = {
    BlockRecompute.SELECTIVE: "selective",
    BlockRecompute.ACTIVATIONS: "activations",
    BlockRecompute.PROJECTIONS: "projections",
    BlockRecompute.OFFLOAD: Recompute.OFFLOAD,
}
WHOLE_LAYER = {BlockRecompute.FULL: "full", BlockRecompute.TO_THE_END: "groups_1"}
"""What recomputes a layer alone as a whole; a group runs to its end."""


def settings_of(candidate: Candidate, request: ExplorationRequest) -> Settings:
    """What a candidate sets on a whole model."""
    values = {choice.name: getattr(candidate, choice.fields[0]) for choice in CHOICES}
    own = {name: value for name, value in values.items() if value is not None}
    return Settings.of(
        {EXECUTION.name: request.plain_execution} | own,
        attention=candidate.attention_backend,
        experts=candidate.expert_backend,
        recompute=candidate.recompute.value,
        bta_tile=candidate.bta_tile,
        allocator=request.allocator,
        float8=float8_of(request),
    )


def settings_of_component(component: Component, request: ExplorationRequest) -> Settings:
    """What a component sets on the shell or on a layer; recomputation of a layer as a whole is left out."""
    backend = component.backend or BackEnd()
    if component.kind is ComponentKind.SHELL:
        found = marked_values(CodePart.SHELL, (backend.setting or "").split("+"))
        return Settings.of({choice.name: value for choice, value in found if value is not None})
    found = marked_values(CodePart.LAYER, backend.marks)
    stated = {EXECUTION.name: request.plain_execution.captured}
    return Settings.of(
        stated | {choice.name: value for choice, value in found if value is not None},
        attention=component.attention,
        experts=component.experts,
        recompute=BY_OPERATION.get(component.recompute, "none"),
        bta_tile=component.bta_tile,
        float8=float8_of(request),
    )


def float8_of(request: ExplorationRequest) -> Float8 | None:
    """Return the recipe by which linear layers are computed in float8; None if they are not."""
    return cast(Float8 | None, request.training.float8_recipe)
