"""Tensor, pipeline and expert parallelism on the devices that are there: a search space of its own.

`bexp.explorer.search.extensions` names this package, and no other file of the search does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bexp.explorer.model.parts import ExploredModel
    from bexp.explorer.request.request import ExplorationRequest
    from bexp.explorer.search.progress_log import ProgressLog
    from bexp.explorer.search.search_space import SearchSpace
    from bexp.explorer.search.variant_context import VariantContext


def models_of(request: ExplorationRequest) -> tuple[ExploredModel, ...] | None:
    """Return the models to explore on meshes of devices; None if a request is about none."""
    return (request.shapes,) if request.devices.is_mesh else None


def open_space(context: VariantContext, log: ProgressLog) -> SearchSpace:
    """Return the meshes of a variant.

    Raises:
        EmptySpaceError: there is none.
    """
    from bexp.explorer.meshes.space import MeshSpace  # noqa: PLC0415 - most explorations need none of it

    return MeshSpace(context, log)
