"""Refuses query parameters that a route does not know: a misspelt filter would list everything."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from bexp.api.refusals import invalid_parameter
from bexp.explorer.model.spelling import did_you_mean, shortened


async def refuse_unknown_parameters(request: Request) -> None:
    """Raise a 422 that names the first query parameter that the route of `request` does not take."""
    if not request.query_params:
        return
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    known = set(_parameters(route.dependant))
    for name in request.query_params:
        if name not in known:
            raise invalid_parameter(shortened(name), f"is no parameter of this route{did_you_mean(name, known)}")


def _parameters(dependant: Dependant) -> Iterator[str]:
    for field in dependant.query_params:
        yield field.alias
    for inner in dependant.dependencies:
        yield from _parameters(inner)
