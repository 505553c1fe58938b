"""The stream of an exploration's events: each exactly once and in order, whatever breaks meanwhile."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from bexp.client.connection import Connection, exploration_path, raise_for_stream
from bexp.client.errors import ServiceError
from bexp.explorer.records.event import EventCode

SILENCE_SECONDS = 45.0  # the server sends comments more often than this while nothing happens
PATIENCE_SECONDS = 60.0


def follow_events(
    connection: Connection,
    job_id: str,
    *,
    after: int = 0,
    patience_seconds: float = PATIENCE_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[dict[str, Any]]:
    """Follow the events of an exploration from `after` (exclusive) to its end.

    After a dropped connection it continues where the connection broke. It yields nothing if `after` is the last event
    of an exploration that has ended. Raises ServiceError if the service sends neither an event nor a keep-alive for
    `patience_seconds`, or if an event cannot be read.

    An exploration that was cancelled and resumed has events after the one that ended it first.
    """
    seq, waited, delay, has_ended = after, 0.0, 0.2, False
    since = time.monotonic()

    def hear() -> None:
        nonlocal waited, delay, since
        waited, delay, since = 0.0, 0.2, time.monotonic()

    while True:
        reason: str
        since = time.monotonic()
        try:
            for event in _connect(connection, job_id, seq, hear):
                if event["seq"] <= seq:
                    continue
                if event["seq"] > seq + 1:
                    raise ServiceError(f"the service skipped events {seq + 1} to {event['seq'] - 1}")
                seq = event["seq"]
                has_ended = event["code"] >= EventCode.SUCCEEDED
                yield event
                hear()  # what the caller does with the event is no silence
            if has_ended:
                return
            reason = "the service closed the event stream"
        except _CompleteError:
            return
        except httpx.HTTPError as error:
            reason = connection.reason(error)
        except _RestartingError as error:
            reason = str(error)
        waited += time.monotonic() - since
        if waited >= patience_seconds:
            raise ServiceError(f"{reason} (gave up after {patience_seconds:.0f} s)")
        sleep(delay)
        waited, delay = waited + delay, min(5.0, 2 * delay)


class _RestartingError(Exception):
    """Raised when the service, or a proxy before it, asks the client to come back later."""


class _CompleteError(Exception):
    """Raised when the job has ended and all of its events were seen."""


def _connect(connection: Connection, job_id: str, after: int, hear: Callable[[], None]) -> Iterator[dict[str, Any]]:
    headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": str(after)} if after else {})
    with connection.stream(exploration_path(job_id, "events"), headers, SILENCE_SECONDS) as response:
        if response.status_code in {429, 502, 503, 504}:
            raise _RestartingError(f"the service answered {response.status_code}")
        if response.status_code >= httpx.codes.BAD_REQUEST:
            raise_for_stream(response)
        if response.status_code == httpx.codes.NO_CONTENT:  # do not connect again (WHATWG HTML, 9.2)
            raise _CompleteError
        for data in _sse_data(response.iter_lines(), hear):
            yield _read(data)


def _read(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
        if isinstance(event["seq"], int) and isinstance(event["code"], int):
            return dict(event)
    except (ValueError, TypeError, KeyError):
        pass
    raise ServiceError(f"the service sent an event that cannot be read: {data[:100]}")


def _sse_data(lines: Iterator[str], hear: Callable[[], None]) -> Iterator[str]:
    """Yield the data of each server-sent event (WHATWG HTML, 9.2), and call `hear` at each comment, a keep-alive.

    An incomplete last event is dropped.
    """
    data: list[str] = []
    for line in lines:
        if not line:
            if data:
                yield "\n".join(data)
            data = []
        elif line.startswith(":"):
            hear()
        elif line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))
