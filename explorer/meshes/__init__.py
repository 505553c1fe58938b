"""Tensor, pipeline and expert parallelism on the devices that are there: a search space of its own.

`bexp.explorer.model.extensions` names this package, and no other file of the core does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import BaseModel

    from bexp.explorer.model.parts import ExploredModel
    from bexp.explorer.request.request import ExplorationRequest
    from bexp.explorer.request.request_rules import Rule
    from bexp.explorer.search.loop import ProgressLog, VariantContext
    from bexp.explorer.search.search_space import SearchSpace


def record_types() -> tuple[type[BaseModel], ...]:
    """Return what trials and recommendations have of a mesh."""
    from bexp.explorer.meshes.mesh import Mesh, MeshPlan, MeshRun  # noqa: PLC0415 - they import what asks for them

    return Mesh, MeshRun, MeshPlan


def rules_for(request: ExplorationRequest) -> tuple[Rule, ...] | None:
    """Return the rules of a request that names meshes; None if it names none."""
    if not request.parallelism.shares_model:
        return None
    from bexp.explorer.meshes.legal import MESH_RULES, SINGLE_DEVICE_RULES  # noqa: PLC0415 - most requests name none

    return MESH_RULES if request.devices.share_model else SINGLE_DEVICE_RULES


def models_of(request: ExplorationRequest) -> tuple[ExploredModel, ...] | None:
    """Return the models to explore on meshes of devices; None if a request is about none."""
    return (request.shapes,) if request.devices.share_model else None


def open_space(context: VariantContext, log: ProgressLog) -> SearchSpace:
    """Return the meshes of a variant. Raises EmptySpaceError if there is none."""
    from bexp.explorer.meshes.space import MeshSpace  # noqa: PLC0415 - most explorations need none of it

    return MeshSpace(context, log)
