"""The results of an exploration: recommendation, trials, comparison with another, and reports of real runs."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Response

from bexp.api import bodies, examples
from bexp.api.auth import Reader, Submitter
from bexp.api.cli.errors import CommandError
from bexp.api.refusals import ProblemException, readable
from bexp.api.resources import RunReportPage, RunReportResource, TrialPage, exploration_of
from bexp.api.routes.explorations import JobDep, SummaryDep
from bexp.api.service import ServiceDep, body_text
from bexp.api.stored import StoredExplorations, export_notes, export_of, why_nothing
from bexp.client.address import exploration_path
from bexp.client.errors import ProblemError, ServiceError
from bexp.client.explorations import NO_RECOMMENDATION, NOTE_HEADER, Result
from bexp.explorer.records.run_report import RunReport
from bexp.explorer.trainers.document import ExportDocument
from bexp.storage.jobs import get_summary
from bexp.storage.run_reports import insert_run_report, read_run_reports
from bexp.storage.trials import read_trials

router = APIRouter(
    prefix="/v1/explorations/{exploration_id}", tags=["results"], dependencies=[Depends(bodies.accepts_json)]
)

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


@router.get(
    "/comparison",
    summary="How likely another answer is faster",
    responses={
        200: examples.example(examples.COMPARISON),
        **examples.problems(
            f"{_ONE}/comparison", HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY
        ),
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
        raise ProblemException(HTTPStatus.CONFLICT, f"{error.lines[0]}.", name=NO_RECOMMENDATION) from None
    except (ProblemError, ServiceError) as error:  # the database is away
        assert error.__cause__ is not None, "StoredExplorations says why"
        raise error.__cause__ from None


MAX_REPORT_BYTES = 16 * 1024


@router.post(
    "/run-reports",
    status_code=HTTPStatus.CREATED,
    summary="Report a real run",
    responses={
        201: examples.example(examples.RUN_REPORT, description="Stored")
        | {"headers": {"Location": {"description": "The exploration's reports.", "schema": {"type": "string"}}}},
        **examples.problems(
            f"{_ONE}/run-reports",
            HTTPStatus.NOT_FOUND,
            HTTPStatus.CONFLICT,
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            HTTPStatus.UNPROCESSABLE_ENTITY,
        ),
    },
    openapi_extra=bodies.described("RunReport", examples.RUN_REPORT["report"]),
)
def report_run(
    _caller: Submitter,
    job: SummaryDep,
    text: Annotated[str, Depends(body_text(MAX_REPORT_BYTES))],
    service: ServiceDep,
    response: Response,
) -> RunReportResource:
    """Store the speed of a training run with the recommendation. 409 while there is no recommendation."""
    report = bodies.parse_body(RunReport, text, "This is no report of a run.")
    stored = insert_run_report(service.database, job.id, report)
    response.headers["Location"] = f"{exploration_path(job.id)}/run-reports"
    return RunReportResource.of(stored)


@router.get(
    "/run-reports",
    summary="The reports of real runs",
    responses={
        200: examples.example(examples.RUN_REPORTS),
        **examples.problems(f"{_ONE}/run-reports", HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
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
