"""Reports of real runs: what a trainer reached with a recommendation."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import ValidationError

from bexp.api import bodies, examples
from bexp.api.auth import Submitter
from bexp.api.negotiation import accepts_json
from bexp.api.refusals import invalid_body
from bexp.api.resources import RunReportPage, RunReportResource
from bexp.api.routes.explorations import SummaryDep
from bexp.api.service import ServiceDep
from bexp.client.address import exploration_path
from bexp.explorer.formats.document import load_document
from bexp.explorer.model.base import rule_of
from bexp.explorer.records.run_report import RunReport
from bexp.storage.run_reports import insert_run_report, read_run_reports

router = APIRouter(prefix="/v1/explorations/{exploration_id}", tags=["results"], dependencies=[Depends(accepts_json)])

MAX_REPORT_BYTES = 16 * 1024

_HERE = f"{exploration_path(examples.JOB_ID)}/run-reports"


async def _text_of(request: Request, service: ServiceDep) -> str:
    return await bodies.read_text(request, MAX_REPORT_BYTES, service.settings.body_seconds)


@router.post(
    "/run-reports",
    status_code=HTTPStatus.CREATED,
    summary="Report a real run",
    responses={
        201: examples.example(examples.RUN_REPORT, description="Stored")
        | {"headers": {"Location": {"description": "The exploration's reports.", "schema": {"type": "string"}}}},
        **examples.problems(
            _HERE,
            HTTPStatus.NOT_FOUND,
            HTTPStatus.CONFLICT,
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            HTTPStatus.UNPROCESSABLE_ENTITY,
        ),
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                bodies.JSON: {
                    "schema": {"$ref": "#/components/schemas/RunReport"},
                    "example": examples.RUN_REPORT["report"],
                }
            },
        }
    },
)
def report_run(
    _caller: Submitter,
    job: SummaryDep,
    text: Annotated[str, Depends(_text_of)],
    service: ServiceDep,
    response: Response,
) -> RunReportResource:
    """Store the speed of a training run with the recommendation. 409 while there is no recommendation."""
    try:
        report = RunReport.model_validate(load_document(text))
    except ValidationError as error:
        problems = [(detail["loc"], rule_of(detail)) for detail in error.errors(include_url=False, include_input=False)]
        raise invalid_body(problems, "This is no report of a run.") from None
    stored = insert_run_report(service.database, job.id, report)
    response.headers["Location"] = f"{exploration_path(job.id)}/run-reports"
    return RunReportResource.of(stored)


@router.get(
    "/run-reports",
    summary="The reports of real runs",
    responses={
        200: examples.example(examples.RUN_REPORTS),
        **examples.problems(_HERE, HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
    },
)
def list_run_reports(
    job: SummaryDep,
    service: ServiceDep,
    cursor: Annotated[int, Query(ge=0, lt=1 << 31, description="`next_cursor` of the page before.", examples=[2])] = 0,
    limit: Annotated[int, Query(ge=1, le=1000, description="How many.")] = 100,
) -> RunReportPage:
    """The reports of trainers, in the order in which they arrived."""
    stored = read_run_reports(service.database, job.id, after=cursor, limit=limit + 1)
    page = stored[:limit]
    next_cursor = str(page[-1].seq) if len(stored) > limit else None
    return RunReportPage(items=[RunReportResource.of(one) for one in page], next_cursor=next_cursor)
