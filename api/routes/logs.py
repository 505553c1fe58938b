"""The events of an exploration, as server-sent events, as pages of JSON, and as BEXP lines."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event

from bexp.api import examples
from bexp.api.auth import Reader
from bexp.api.bodies import EVENT_STREAM, JSON, PLAIN_TEXT, choose_media_type
from bexp.api.refusals import invalid_parameter
from bexp.api.resources import EventPage
from bexp.api.routes.explorations import JobIdDep
from bexp.api.service import Service, ServiceDep
from bexp.client.address import exploration_path
from bexp.explorer.records.event import Event, render_line
from bexp.storage.events import read_events
from bexp.storage.jobs import get_summary

router = APIRouter(prefix="/v1/explorations/{exploration_id}", tags=["events"])

RETRY_MILLISECONDS = 1000

_ONE = exploration_path(examples.JOB_ID)
_LIVE = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_MAX_SEQ = (1 << 31) - 1

After = Annotated[int, Query(ge=0, le=_MAX_SEQ, description="Return only events with a greater seq.", examples=[17])]


@router.get(
    "/events",
    response_model=EventPage,
    summary="The events, streamed or by page",
    responses={
        200: {
            "description": "Server-sent events until the exploration ends; with Accept: application/json, one page",
            "content": {
                EVENT_STREAM: {"schema": {"type": "string"}, "example": examples.EVENT_STREAM},
                JSON: {"example": examples.EVENTS},
            },
        },
        204: {"description": "The exploration has ended, and its last event was seen: do not connect again"},
        **examples.problems(f"{_ONE}/events", HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
    },
)
async def follow_events(
    request: Request,
    job_id: JobIdDep,
    service: ServiceDep,
    caller: Reader,
    after: After = 0,
    limit: Annotated[int, Query(ge=1, le=500, description="The most events on a page of JSON.")] = 500,
    last_event_id: Annotated[
        str | None, Header(description="Resume after this event; it takes precedence over `after`.", examples=["17"])
    ] = None,
) -> Response:
    """The log of an exploration.

    A server-sent event has the seq as its id, the name of the code as its event, and the event's JSON as its data.
    The stream ends with the exploration, and within seconds after its token was revoked or has expired.
    """
    media_type = choose_media_type(request, (EVENT_STREAM, JSON))
    if last_event_id:
        if re.fullmatch(r"[0-9]{1,10}", last_event_id) is None or int(last_event_id) > _MAX_SEQ:
            raise invalid_parameter("Last-Event-ID", "must be the seq of an event")
        after = int(last_event_id)
    job = await run_sync(partial(get_summary, service.database, job_id, owner=caller.sees))
    if media_type == JSON:
        page = await run_sync(_read_page, service, job_id, after, limit)
        return Response(page.model_dump_json(), media_type=JSON, headers={"Vary": "Accept"})
    if job.state.is_final and after >= job.last_seq:
        return Response(status_code=HTTPStatus.NO_CONTENT, headers={"Vary": "Accept"})
    service.stream_limits.check(caller.token)
    stream = _server_sent(service, request, job_id, after)
    return EventSourceResponse(stream, headers={**_LIVE, "Vary": "Accept"})


@router.get(
    "/log",
    response_class=StreamingResponse,
    summary="The log as BEXP lines",
    responses={
        200: examples.example(examples.LOG, PLAIN_TEXT, "One line an event"),
        **examples.problems(f"{_ONE}/log", HTTPStatus.NOT_FOUND),
    },
)
async def read_log(
    request: Request,
    job_id: JobIdDep,
    service: ServiceDep,
    caller: Reader,
    follow: Annotated[bool, Query(description="Stream until the exploration ends.", examples=[True])] = False,
    after: After = 0,
) -> StreamingResponse:
    """The log for people: `curl -N '.../log?follow=true'` shows it live."""
    choose_media_type(request, (PLAIN_TEXT,))
    await run_sync(partial(get_summary, service.database, job_id, owner=caller.sees))
    service.stream_limits.check(caller.token)
    lines = (_follow_lines if follow else _stored_lines)(service, request, job_id, after)
    return StreamingResponse(lines, media_type=PLAIN_TEXT, headers=_LIVE)


def _read_page(service: Service, job_id: str, after: int, limit: int) -> EventPage:
    events = read_events(service.database, job_id, after=after, limit=limit + 1)
    page = events[:limit]
    return EventPage(items=page, next_cursor=str(page[-1].seq) if len(events) > limit else None)


@contextmanager
def _open_stream(service: Service, request: Request, job_id: str) -> Iterator[Callable[[], bool]]:
    """Count a stream while it is open; yield a function that returns whether it may go on."""
    token = request.state.caller.token
    with service.stream_limits.count(token), service.tokens.stream(request.state.secret, job_id) as may_continue:
        yield may_continue


async def _server_sent(service: Service, request: Request, job_id: str, after: int) -> AsyncIterator[bytes]:
    with _open_stream(service, request, job_id) as may_continue:
        yield format_sse_event(retry=RETRY_MILLISECONDS)
        turn = request.state.turn
        async for frames in service.feed.follow(job_id, after, _frames, may_continue=may_continue, turn=turn):
            yield frames or KEEPALIVE_COMMENT


def _frames(events: Iterable[Event]) -> bytes:
    return b"".join(
        format_sse_event(id=str(event.seq), event=event.code.name.lower(), data_str=event.model_dump_json())
        for event in events
    )


async def _follow_lines(service: Service, request: Request, job_id: str, after: int) -> AsyncIterator[bytes]:
    with _open_stream(service, request, job_id) as may_continue:
        turn = request.state.turn
        async for lines in service.feed.follow(job_id, after, _lines, may_continue=may_continue, turn=turn):
            if lines:
                yield lines


async def _stored_lines(service: Service, request: Request, job_id: str, after: int) -> AsyncIterator[bytes]:
    with _open_stream(service, request, job_id) as may_continue:
        while may_continue():
            page = await service.feed.read(job_id, after, _lines, request.state.turn)
            if page.last_seq == after:
                return
            yield page.text
            after = page.last_seq


def _lines(events: Iterable[Event]) -> bytes:
    return "".join(render_line(event) + "\n" for event in events).encode()
