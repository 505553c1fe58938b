"""Routes that submit, list, show, cancel, delete and resume explorations."""

from __future__ import annotations

import re
from collections.abc import Iterable
from http import HTTPStatus
from typing import Annotated, Any
from zlib import crc32

from fastapi import APIRouter, Depends, Header, Query, Response

from bexp.api import bodies, examples
from bexp.api.auth import Canceller, Reader, Submitter
from bexp.api.refusals import invalid_parameter
from bexp.api.resources import NO_NUL, SEARCH, ExplorationPage, Notes, exploration_of, summary_of
from bexp.api.service import Service, ServiceDep, body_text
from bexp.api.stored import submit
from bexp.client.address import exploration_path
from bexp.client.explorations import Exploration
from bexp.explorer.formats.document import FormatError, load_document, read_field
from bexp.explorer.formats.request import parse_request
from bexp.explorer.request.labels import MAX_LABELS, parse_label
from bexp.storage.jobs import (
    InvalidCursorError,
    Job,
    JobFilter,
    JobNotFoundError,
    JobState,
    JobSummary,
    get_job,
    get_summary,
    list_jobs,
)
from bexp.storage.owners import Caller, Scope
from bexp.storage.pruning import delete_job
from bexp.storage.submission import JobFinishedError
from bexp.storage.waiting import QueuePlace, find_place, find_places

router = APIRouter(prefix="/v1/explorations", tags=["explorations"], dependencies=[Depends(bodies.accepts_json)])

_HERE = "/v1/explorations"
_ONE = exploration_path(examples.JOB_ID)
_LOCATION: dict[str, Any] = {"headers": {"Location": {"description": "The exploration.", "schema": {"type": "string"}}}}
_ETAG = re.compile(r'(?:W/)?("[\x21\x23-\x7e\x80-\xff]*")')


async def job_id_of(exploration_id: str) -> str:
    """Return the id in the path if an exploration can have it: a dependency of routes.

    Raises:
        JobNotFoundError: no exploration can have this id.
    """
    if not re.fullmatch(r"[A-Za-z0-9]{1,32}", exploration_id):
        raise JobNotFoundError(exploration_id)
    return exploration_id


JobIdDep = Annotated[str, Depends(job_id_of)]


def _job_of(job_id: JobIdDep, service: ServiceDep, caller: Reader) -> Job:
    return get_job(service.database, job_id, owner=caller.sees)


def _summary_of(job_id: JobIdDep, service: ServiceDep, caller: Reader) -> JobSummary:
    return get_summary(service.database, job_id, owner=caller.sees)


JobDep = Annotated[Job, Depends(_job_of)]
SummaryDep = Annotated[JobSummary, Depends(_summary_of)]
"""The summary of an exploration, which suffices for most routes: no stored document is parsed for it."""


def _shown(service: Service, job: Job, caller: Caller) -> Exploration:
    return exploration_of(job, with_results=caller.may(Scope.READ), place=find_place(service.database, job))


def _fields(assignments: Iterable[str]) -> dict[str, Any]:
    try:
        return dict(map(read_field, assignments))
    except FormatError:
        raise
    except ValueError:
        raise invalid_parameter("set", "must be written as FIELD=VALUE") from None


@router.post(
    "",
    status_code=HTTPStatus.ACCEPTED,
    response_model=Exploration,
    summary="Submit an exploration",
    responses={
        202: examples.example(examples.QUEUED, description="Queued") | _LOCATION,
        201: examples.example(examples.ANSWERED, description="Answered at once from what is stored")
        | _LOCATION
        | {"model": Exploration},
        **examples.problems(
            _HERE,
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            HTTPStatus.UNPROCESSABLE_ENTITY,
            HTTPStatus.TOO_MANY_REQUESTS,
        ),
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "description": "An exploration request, a Hugging Face config.json, or a Cerebras Model Zoo configuration.",
            "content": {
                bodies.JSON: {
                    "schema": {"anyOf": [{"$ref": "#/components/schemas/ExplorationRequest"}, {"type": "object"}]},
                    "example": examples.REQUEST,
                },
                bodies.YAML: {"schema": {"type": "string"}, "example": examples.REQUEST_YAML},
            },
        }
    },
)
def submit_exploration(
    caller: Submitter,
    text: Annotated[str, Depends(body_text())],
    service: ServiceDep,
    idempotency_key: Annotated[
        str | None,
        Header(
            description="For 24 hours, the same key of an owner with the same request gives the same exploration; "
            "with another request, a 422. The key of an exploration that failed or was cancelled is free again.",
            examples=["run-7"],
        ),
    ] = None,
    priority: Annotated[
        int, Query(ge=-100, le=100, description="Among the explorations of its owner, the highest is next.")
    ] = 0,
    assignments: Annotated[
        list[str] | None,
        Query(
            alias="set",
            max_length=32,
            description="A field of the request in place of what the body says, `FIELD=VALUE`, as `bexp submit --set` "
            "takes it; may be repeated.",
            examples=[["batch_size=256", "model.seq_length=4096"]],
        ),
    ] = None,
) -> Response:
    """Queue an exploration, which a worker will run.

    The same request may have been measured on the hardware and with the versions of a live worker. Then the exploration
    has that answer and ends at once: 201. `fresh: true` in the request measures again.
    """
    request = parse_request(load_document(text), overrides=_fields(assignments or ()))
    job, is_new = submit(service.queue, request, idempotency_key=idempotency_key, priority=priority, by=caller)
    shown = _shown(service, job, caller)
    return Response(  # what FastAPI makes of a model takes another thread
        shown.model_dump_json(),
        status_code=HTTPStatus.CREATED if is_new and job.state.is_final else HTTPStatus.ACCEPTED,
        headers={"Location": exploration_path(job.id)},
        media_type=bodies.JSON,
    )


@router.get(
    "",
    summary="List explorations, the newest first",
    responses={
        200: examples.example(examples.PAGE),
        **examples.problems(_HERE, HTTPStatus.UNPROCESSABLE_ENTITY),
    },
)
def list_explorations(
    service: ServiceDep,
    caller: Reader,
    state: Annotated[
        JobState | None, Query(description="List only explorations in this state.", examples=["running"])
    ] = None,
    model: Annotated[
        str | None,
        Query(
            max_length=128,
            pattern=NO_NUL,
            description="List only explorations of this model.",
            examples=["tiny-moe"],
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        Query(
            max_length=MAX_LABELS,
            description="List only explorations with this label, `key=value`. Several must all be there.",
            examples=[["team=search"]],
        ),
    ] = None,
    search: Annotated[
        str,
        Query(
            max_length=192,
            pattern=SEARCH,
            description="List only explorations that have each of these words, eight at most, whatever its case, in "
            "the model's name, the device, the owner or a label, or at the beginning of the id (4 characters or more).",
            examples=["h100 team=search"],
        ),
    ] = "",
    limit: Annotated[int, Query(ge=1, le=200, description="How many.")] = 50,
    cursor: Annotated[str | None, Query(max_length=256, description="`next_cursor` of the page before.")] = None,
) -> ExplorationPage:
    """One page of the explorations of the token's owner; with the scope `admin`, of all owners.

    A cursor is a place in the order of submission: no exploration comes twice or is missed because others are added or
    deleted meanwhile.
    """
    try:
        labels = [parse_label(text) for text in label or ()]
    except ValueError as error:
        raise invalid_parameter("label", str(error)) from None
    wanted = JobFilter(state, model, tuple(labels), owner=caller.sees, search=search)
    try:
        jobs, next_cursor = list_jobs(service.database, wanted=wanted, limit=limit, cursor=cursor)
    except InvalidCursorError:
        raise invalid_parameter("cursor", "is not one that this list gave out") from None
    places = find_places(service.database, jobs)
    return ExplorationPage(items=[summary_of(job, places.get(job.id)) for job in jobs], next_cursor=next_cursor)


@router.get(
    "/{exploration_id}",
    response_model=Exploration,
    summary="One exploration",
    responses={
        200: examples.example(examples.EXPLORATION)
        | {
            "headers": {
                "ETag": {"description": "Changes whenever the exploration changes.", "schema": {"type": "string"}}
            }
        },
        304: {"description": "Unchanged since the ETag in If-None-Match"},
        **examples.problems(_ONE, HTTPStatus.NOT_FOUND),
    },
)
def get_exploration(
    summary: SummaryDep,
    service: ServiceDep,
    response: Response,
    if_none_match: Annotated[str | None, Header(description="ETags that the client knows.", examples=['"7"'])] = None,
) -> Exploration | Response:
    """The state of an exploration, with its request and its results."""
    place = find_place(service.database, summary)
    etag = _etag(summary, place)
    if if_none_match is not None and (if_none_match.strip() == "*" or etag in _ETAG.findall(if_none_match)):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers={"ETag": etag, "Cache-Control": "no-cache"})
    job = get_job(service.database, summary.id)
    response.headers["ETag"] = _etag(job, place)
    response.headers["Cache-Control"] = "no-cache"
    return exploration_of(job, place=place)


def _etag(job: JobSummary, place: QueuePlace | None) -> str:
    """Return the ETag of an exploration; others change its place in the queue."""
    where = "" if place is None else f"-{crc32(repr(place).encode()):x}"
    return f'"{job.version}{where}"'


@router.delete(
    "/{exploration_id}",
    status_code=HTTPStatus.NO_CONTENT,
    summary="Delete an exploration that has ended",
    responses={
        204: {"description": "Deleted"},
        **examples.problems(_ONE, HTTPStatus.NOT_FOUND),
        **examples.problems(_ONE, HTTPStatus.CONFLICT, **examples.NOT_FINISHED),
    },
)
def delete_exploration(job_id: JobIdDep, service: ServiceDep, caller: Canceller) -> None:
    """Delete an exploration with its log, trials, study and run reports. Streams of its log end.

    409 for one that has not ended: cancel it first. Explorations that were answered from it keep their answers.
    """
    delete_job(service.database, job_id, by=caller)


@router.post(
    "/{exploration_id}/cancel",
    status_code=HTTPStatus.ACCEPTED,
    summary="Cancel an exploration",
    responses={
        202: examples.example(examples.CANCELLED, description="Its worker stops within seconds"),
        200: examples.example({**examples.QUEUED, "state": "cancelled"}, description="It has ended")
        | {"model": Exploration},
        **examples.problems(f"{_ONE}/cancel", HTTPStatus.NOT_FOUND),
    },
)
def cancel_exploration(job_id: JobIdDep, service: ServiceDep, caller: Canceller, response: Response) -> Exploration:
    """End an exploration. One that has ended does not change, so the call can be repeated."""
    job = service.queue.request_cancel(job_id, by=caller)
    response.status_code = HTTPStatus.OK if job.state.is_final else HTTPStatus.ACCEPTED
    return _shown(service, job, caller)


MAX_NOTES_BYTES = 32 * 1024  # of as many characters as Notes takes, each escaped


@router.put(
    "/{exploration_id}/notes",
    summary="Write notes on an exploration",
    responses={
        200: examples.example(examples.EXPLORATION),
        **examples.problems(
            f"{_ONE}/notes",
            HTTPStatus.NOT_FOUND,
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            HTTPStatus.UNPROCESSABLE_ENTITY,
        ),
    },
    openapi_extra=bodies.described("Notes", {"text": examples.EXPLORATION["notes"]}),
)
def write_notes(
    job_id: JobIdDep,
    caller: Submitter,
    text: Annotated[str, Depends(body_text(MAX_NOTES_BYTES))],
    service: ServiceDep,
) -> Exploration:
    """Replace the notes of people on an exploration, in any state. Its page and `bexp best -v` show them."""
    notes = bodies.parse_body(Notes, text, "These are no notes.")
    job = service.queue.write_notes(job_id, notes.text, by=caller)
    return _shown(service, job, caller)


@router.post(
    "/{exploration_id}/resume",
    status_code=HTTPStatus.ACCEPTED,
    summary="Resume an exploration that was cancelled or has failed",
    responses={
        202: examples.example(examples.QUEUED, description="It waits for a worker, or one runs it"),
        **examples.problems(f"{_ONE}/resume", HTTPStatus.NOT_FOUND),
        **examples.problems(
            f"{_ONE}/resume",
            HTTPStatus.CONFLICT,
            type="urn:bexp:problem:finished",
            detail=f"{JobFinishedError(examples.JOB_ID)}.",
        ),
    },
)
def resume_exploration(job_id: JobIdDep, service: ServiceDep, caller: Submitter) -> Exploration:
    """Queue an exploration again. It goes on where it stopped; no stored trial is measured again.

    An exploration that waits or runs does not change, so the call can be repeated.
    """
    job = service.queue.resume(job_id, by=caller)
    return _shown(service, job, caller)
