"""Sends requests over a connection that is kept, several before the first answer, and judges the answers."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # it has no types

from tests.chaos.fuzz_changes import Request, Tenant
from tests.chaos.promises import ANSWER_SECONDS

PROBLEM = "application/problem+json"
PATIENCE_SECONDS = 4 * ANSWER_SECONDS
STREAM_SECONDS = 1.0
"""How long a stream is read that may have nothing to tell."""
VALIDATED = 20
"""One of so many answers is compared with its whole schema, which takes longer than the answer itself."""
NO_ROUTE = frozenset({401, 403, 404, 405, 429})
ALWAYS = frozenset({429, 503})
OF_CHANGES = frozenset({400, 401, 405, 406, 413, 415})
"""What no valid request is answered with."""
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


@dataclass
class Answer:
    """The answer to a request; status 0: the connection was closed instead."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    seconds: float = 0.0
    is_cut: bool = False

    @property
    def media_type(self) -> str:
        """What the body is."""
        return self.headers.get("content-type", "").split(";")[0]


class Connection:
    """A connection to a service, which is opened again if one of both sides has closed it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def exchange(self, requests: Sequence[Request]) -> list[Answer]:
        """Send requests at once and return their answers; fewer than requests if the service said that it closes."""
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 26)
        answers: list[Answer] = []
        since = time.perf_counter()
        with suppress(OSError):
            self._writer.write(b"".join(request.render() for request in requests))
            if requests[-1].raw is not None:
                self._writer.write_eof()
        for request in requests:
            try:
                answer = await asyncio.wait_for(_read(self._reader, request), PATIENCE_SECONDS)
            except (ConnectionError, asyncio.IncompleteReadError, TimeoutError):
                answer = Answer(0)
            answer.seconds = time.perf_counter() - since
            since += answer.seconds
            answers.append(answer)
            is_last = answer.is_cut or request.raw is not None or answer.headers.get("connection") == "close"
            if is_last or not answer.status:
                await self.close()
                break
        return answers

    async def close(self) -> None:
        """Close it."""
        if self._writer is not None:
            self._writer.close()
            with suppress(ConnectionError):
                await self._writer.wait_closed()
        self._reader = self._writer = None


async def _read(reader: asyncio.StreamReader, request: Request) -> Answer:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head[:-4].split(b"\r\n")
    found = _STATUS.match(first)
    assert found is not None, first
    pairs = (line.decode("latin-1").split(":", 1) for line in lines)
    answer = Answer(int(found[1]), {name.lower(): value.strip() for name, value in pairs})
    if request.method == "HEAD" or answer.status in {204, 304}:
        return answer
    if "chunked" not in answer.headers.get("transfer-encoding", ""):
        length = answer.headers.get("content-length")
        answer.body = await (reader.read() if length is None else reader.readexactly(int(length)))
        return answer
    answer.is_cut = request.is_stream and answer.status == 200
    with suppress(TimeoutError):
        async with asyncio.timeout(STREAM_SECONDS if answer.is_cut else None):
            while size := int(await reader.readline(), 16):
                answer.body += (await reader.readexactly(size + 2))[:-2]
                if answer.is_cut:
                    return answer
            await reader.readline()
    return answer


class Judge:
    """Compares answers with the OpenAPI document, and with what a change must lead to."""

    def __init__(self, document: Mapping[str, Any], tenants: Sequence[Tenant]) -> None:
        self._paths = document["paths"]
        self._components = document["components"]
        self._names = [tenant.name.encode() for tenant in tenants]
        self._validators: dict[str, Any] = {}
        self._num = 0

    def faults_of(self, request: Request, answer: Answer) -> Iterator[str]:
        """Return what is wrong with an answer, a line each."""
        status = answer.status
        if request.raw is not None:
            if status >= 500 or 200 <= status < 300:
                yield f"{status} for what is no HTTP"
            return
        if not status:
            yield "no answer"
            return
        if answer.seconds > ANSWER_SECONDS:
            yield f"an answer took longer than {ANSWER_SECONDS:g} s"
        if status >= 500 and status != 503:
            yield f"status {status}: {answer.body[:300]!r}"
        if request.is_refused and 200 <= status < 300:
            yield f"status {status}, and it had to be refused"
        if request.expected and status not in request.expected | ALWAYS:
            yield f"status {status}, and not one of {sorted(request.expected)}"
        if not request.change and status in OF_CHANGES:
            yield f"status {status} for a valid request"
        yield from self._of_shape(request, answer)
        if request.tenant is not None:
            sent = request.render()
            for name in self._names:
                if name in answer.body and name != request.tenant.name.encode() and name not in sent:
                    yield f"{name.decode()} is named in the answer to {request.tenant.name}"

    def _of_shape(self, request: Request, answer: Answer) -> Iterator[str]:
        declared: Mapping[str, Any] = {}
        if request.route is None:
            if answer.status not in NO_ROUTE | ALWAYS:
                yield f"status {answer.status} where there is no route"
        else:
            method, path = request.route.split(" ")
            responses = self._paths[path][method.lower()]["responses"]
            if str(answer.status) not in responses:
                yield f"status {answer.status} is not declared for {request.route}"
            declared = responses.get(str(answer.status), {}).get("content", {})
            if answer.body and answer.media_type not in declared:
                yield f"{answer.media_type} is not declared for {answer.status} of {request.route}"
        if answer.status >= 400 and request.method != "HEAD" and answer.media_type != PROBLEM:
            yield f"an error is {answer.media_type}"
        if not answer.body or not answer.media_type.endswith("json"):
            return
        try:
            document = json.loads(answer.body)
        except ValueError as error:
            yield f"no JSON: {error}"
            return
        if answer.status >= 400 and (told := document.get("status")) != answer.status:
            yield f"a problem says {told}, and its status is {answer.status}"
        self._num += 1
        if self._num % VALIDATED == 0 and answer.media_type in declared:
            key = f"{request.route} {answer.status} {answer.media_type}"
            yield from self._of_schema(key, declared[answer.media_type].get("schema", {}), document)

    def _of_schema(self, key: str, schema: Mapping[str, Any], document: Any) -> Iterator[str]:
        if key not in self._validators:
            whole = {**schema, "components": self._components}
            self._validators[key] = jsonschema.Draft202012Validator(whole)
        for error in self._validators[key].iter_errors(document):
            yield f"not as declared for {key}: {error.json_path}: {error.message[:200]}"
