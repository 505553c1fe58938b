"""The choice of a media type that a route offers and the client accepts (RFC 9110, section 12.5.1)."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

from fastapi import Request

from bexp.api.refusals import ProblemException

JSON = "application/json"
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
