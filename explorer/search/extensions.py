"""Search spaces that are no part of the core: extensions say which requests they serve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from bexp.explorer.model.extensions import extensions

if TYPE_CHECKING:
    from bexp.explorer.model.parts import ExploredModel
    from bexp.explorer.request.request import ExplorationRequest
    from bexp.explorer.search.progress_log import ProgressLog
    from bexp.explorer.search.search_space import SearchSpace
    from bexp.explorer.search.variant_context import VariantContext


class SearchExtension(Protocol):
    """The interface of an extension to the search."""

    def models_of(self, request: ExplorationRequest) -> tuple[ExploredModel, ...] | None:
        """Return the models to explore, one after the other; None if it does not serve the request."""

    def open_space(self, context: VariantContext, log: ProgressLog) -> SearchSpace:
        """Return the space of one of the models. Raises EmptySpaceError if it has no candidate."""


def extension_for(request: ExplorationRequest) -> SearchExtension | None:
    """Return the first extension that serves a request; None if the core does."""
    known = (cast(SearchExtension, one) for one in extensions())
    return next((one for one in known if one.models_of(request) is not None), None)
