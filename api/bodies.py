"""Reads the body of a request up to a limit, decodes it, and chooses the media type of the response."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from email.message import Message
from http import HTTPStatus
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from bexp.api.refusals import ProblemException, invalid_body
from bexp.explorer.formats.document import load_document
from bexp.explorer.model.base import rule_of

Model = TypeVar("Model", bound=BaseModel)

JSON = "application/json"
YAML = "application/yaml"
_YAML_TYPES = frozenset({YAML, "application/x-yaml", "text/yaml", "text/x-yaml"})


def described(schema: str, example: object) -> dict[str, Any]:
    """Return what an OpenAPI operation says of its JSON body, which is of a schema that the document has."""
    content = {JSON: {"schema": {"$ref": f"#/components/schemas/{schema}"}, "example": example}}
    return {"requestBody": {"required": True, "content": content}}


async def read_text(request: Request, max_bytes: int, max_seconds: float) -> str:
    """Return the body of `request`, whose media type says that it is JSON or YAML.

    Raises:
        ProblemException: 415 for another media type or an encoded body, 413 if it has more than `max_bytes`, 408 if it
            takes longer than `max_seconds` to arrive, 422 for bytes that are not UTF-8.
    """
    _check_media_type(request)
    body = await read_body(request, max_bytes, max_seconds)
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise invalid_body([((), f"is not UTF-8: invalid byte at offset {error.start}")]) from None


def parse_body(kind: type[Model], text: str, refusal: str) -> Model:
    """Return the document that a body of JSON or YAML states.

    Raises:
        ProblemException: 422 with the detail `refusal`, because the body breaks rules.
        FormatError: the text is no document.
    """
    try:
        return kind.model_validate(load_document(text))
    except ValidationError as error:
        problems = [(detail["loc"], rule_of(detail)) for detail in error.errors(include_url=False, include_input=False)]
        raise invalid_body(problems, refusal) from None


async def read_body(request: Request, max_bytes: int, max_seconds: float) -> bytes:
    """Return the body of `request`.

    Raises:
        ProblemException: 413 if it has more than `max_bytes`, 408 if it takes longer than `max_seconds` to arrive.
    """
    try:
        async with asyncio.timeout(max_seconds):
            return await _receive(request, max_bytes)
    except TimeoutError:
        raise ProblemException(
            HTTPStatus.REQUEST_TIMEOUT, "The request took too long to arrive.", headers={"Connection": "close"}
        ) from None


def _check_media_type(request: Request) -> None:
    header = Message()
    header["content-type"] = request.headers.get("content-type", "")
    media_type = header.get_content_type() if request.headers.get("content-type") else ""
    known = media_type in {JSON, *_YAML_TYPES} or (
        media_type.startswith("application/") and media_type.endswith("+json")
    )
    charset = str(header.get_param("charset", "utf-8")).lower()
    encoding = request.headers.get("content-encoding", "identity").lower()
    if known and charset in {"utf-8", "utf8", "us-ascii"} and encoding == "identity":
        return
    raise ProblemException(
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        f"Send the request as {JSON} or {YAML}, in UTF-8 and not compressed, and say so in Content-Type.",
        headers={"Accept-Post": f"{JSON}, {YAML}"},
    )


async def _receive(request: Request, max_bytes: int) -> bytes:
    too_large = ProblemException(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"A request may have {max_bytes // 1024} KiB at most."
    )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


EVENT_STREAM = "text/event-stream"
PLAIN_TEXT = "text/plain"


def choose_media_type(request: Request, offered: Sequence[str]) -> str:
    """Return the media type in `offered` that the Accept header prefers, the first of equals.

    Raises:
        ProblemException: 406, none of them is acceptable.
    """
    accept = ",".join(request.headers.getlist("accept")).strip()
    if not accept:
        return offered[0]
    ranges = [_parse_range(part) for part in accept.split(",") if part.strip()]
    best = max(offered, key=lambda media_type: _quality(media_type, ranges))
    if _quality(best, ranges):
        return best
    raise ProblemException(HTTPStatus.NOT_ACCEPTABLE, f"This is offered as {' or '.join(offered)}.")


async def accepts_json(request: Request) -> None:
    """Dependency of the routes that answer JSON only."""
    choose_media_type(request, (JSON,))


def _parse_range(part: str) -> tuple[str, float]:
    media_range, *parameters = (piece.strip().lower() for piece in part.split(";"))
    quality = 1.0
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                quality = min(1.0, max(0.0, float(value)))
            except ValueError:
                quality = 0.0
    return media_range, quality


def _quality(media_type: str, ranges: list[tuple[str, float]]) -> float:
    """Return the quality of the most specific range that covers `media_type`."""
    for covering in (media_type, f"{media_type.partition('/')[0]}/*", "*/*"):
        for media_range, quality in ranges:
            if media_range == covering:
                return quality
    return 0.0
