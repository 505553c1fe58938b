"""The route that compares two answers."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from bexp.api import examples
from bexp.api.auth import Reader
from bexp.api.cli.errors import CommandError
from bexp.api.negotiation import accepts_json
from bexp.api.refusals import ProblemException
from bexp.api.routes.explorations import SummaryDep
from bexp.api.service import ServiceDep
from bexp.api.stored import StoredExplorations
from bexp.client.address import exploration_path
from bexp.client.errors import ProblemError, ServiceError
from bexp.client.explorations import NO_RECOMMENDATION
from bexp.storage.jobs import get_summary

router = APIRouter(prefix="/v1/explorations/{exploration_id}", tags=["results"], dependencies=[Depends(accepts_json)])

_HERE = f"{exploration_path(examples.JOB_ID)}/comparison"


@router.get(
    "/comparison",
    summary="How likely another answer is faster",
    responses={
        200: examples.example(examples.COMPARISON),
        **examples.problems(_HERE, HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY),
    },
)
def compare_explorations(
    a: SummaryDep,
    other: Annotated[
        str, Query(pattern="^[A-Za-z0-9]{1,32}$", description="The id of the other one.", examples=[examples.JOB_ID])
    ],
    service: ServiceDep,
    caller: Reader,
) -> dict[str, Any]:
    """The comparison that `bexp compare --json` prints: this exploration is `a`, and `other` is `b`.

    409 if one of them has no recommendation yet.
    """
    from bexp.api.comparison import compare_answers  # noqa: PLC0415 - SciPy takes long to import, and much memory

    b = get_summary(service.database, other, owner=caller.sees)
    try:
        return compare_answers(StoredExplorations(service.database), a.id, b.id).document
    except CommandError as error:
        for each in (a.id, b.id):  # one may have been deleted meanwhile
            get_summary(service.database, each, owner=caller.sees)
        raise ProblemException(HTTPStatus.CONFLICT, f"{error}.", name=NO_RECOMMENDATION) from None
    except (ProblemError, ServiceError) as error:  # the database is away
        assert error.__cause__ is not None, "StoredExplorations says why"
        raise error.__cause__ from None
