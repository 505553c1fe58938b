"""The results of an exploration: its recommendation and its trials."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Response

from bexp.api import examples
from bexp.api.negotiation import accepts_json
from bexp.api.refusals import ProblemException, readable
from bexp.api.resources import TrialPage, exploration_of
from bexp.api.results import export_notes, export_of, why_nothing
from bexp.api.routes.explorations import JobDep, SummaryDep
from bexp.api.service import ServiceDep
from bexp.client.address import exploration_path
from bexp.client.explorations import NOTE_HEADER, Result
from bexp.explorer.trainers.document import ExportDocument
from bexp.storage.trials import read_trials

router = APIRouter(prefix="/v1/explorations/{exploration_id}", tags=["results"], dependencies=[Depends(accepts_json)])

_ONE = exploration_path(examples.JOB_ID)
SUFFIXES = {
    "application/json": "json",
    "application/yaml": "yaml",
    "text/x-python": "py",
    "text/x-shellscript": "sh",
}
_FILES = {kind: {"schema": {"type": "string"}, "example": "# bexp"} for kind in SUFFIXES if kind != "application/json"}
_RECOMMENDATION = examples.example(examples.RECOMMENDATION)
_RECOMMENDATION["content"] |= _FILES


@router.get(
    "/recommendation",
    summary="The best candidate",
    response_model=Result | dict[str, Any],  # the latter: a file in JSON
    responses={
        200: _RECOMMENDATION,
        **examples.problems(
            f"{_ONE}/recommendation", HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY
        ),
    },
)
def get_recommendation(
    job: JobDep,
    service: ServiceDep,
    export_format: Annotated[
        str | None,
        Query(
            alias="format",
            max_length=64,
            description="Return a file for a training framework, such as `transformers` or `megatron`; an unknown name "
            "is answered with the list.",
        ),
    ] = None,
) -> Result | Response:
    """The best candidate so far; a finished exploration also has the answer, with every variant.

    404 while there is none. If nothing fits, the recommendation of a finished exploration is null, and the variants of
    the answer say why. With `format`, the answer is a file, and 409 says what is missing for it.
    """
    if export_format is not None:
        return _file(export_of(service.database, job, export_format), export_format)
    result = Result.of(exploration_of(job))
    if result is None:
        raise ProblemException(HTTPStatus.NOT_FOUND, why_nothing(job), name="no-recommendation")
    return result


def _file(made: ExportDocument, name: str) -> Response:
    headers = {"Content-Disposition": f'inline; filename="bexp-{name}.{SUFFIXES[made.media_type]}"'}
    response = Response(made.text, media_type=made.media_type, headers=headers)
    for line in export_notes(made):
        response.headers.append(NOTE_HEADER, readable(line, 1000).encode("ascii", "replace").decode())
    return response


@router.get(
    "/trials",
    summary="The trials",
    responses={
        200: examples.example(examples.TRIALS),
        **examples.problems(f"{_ONE}/trials", HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
    },
)
def list_trials(
    job: SummaryDep,
    service: ServiceDep,
    cursor: Annotated[
        int | None,
        Query(
            ge=-1,
            lt=1 << 31,
            description="Return only what was stored after the page that this cursor is from.",
            examples=[41],
        ),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="How many.")] = 100,
) -> TrialPage:
    """The trials in the order of storing, with outcome, measurement, and predicted and measured peak.

    A trial is stored when it ends, so a higher `number` may come first. To follow a running exploration, pass the
    `end_cursor` of the last page and not a number. Then no trial is missed or repeated.
    """
    after = -1 if cursor is None else cursor
    stored = read_trials(service.database, job.id, after=after, limit=limit + 1)
    page = stored[:limit]
    end = str(page[-1].seq if page else after)
    return TrialPage(
        items=[one.trial for one in page], next_cursor=end if len(stored) > limit else None, end_cursor=end
    )
