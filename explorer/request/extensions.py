"""The rules of a request: those of the core, or of the extension that it is for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from bexp.explorer.model.extensions import extensions
from bexp.explorer.request.request_rules import RULES, Rule

if TYPE_CHECKING:
    from bexp.explorer.request.request import ExplorationRequest


class RequestExtension(Protocol):
    """The interface of an extension to requests."""

    def rules_for(self, request: ExplorationRequest) -> tuple[Rule, ...] | None:
        """Return the rules of a request that names something of this package; None if it names nothing."""


def rules_of(request: ExplorationRequest) -> tuple[Rule, ...]:
    """Return the rules of the first extension that has some for a request, else those of the core."""
    rules = (cast(RequestExtension, one).rules_for(request) for one in extensions())
    return next((each for each in rules if each is not None), RULES)
