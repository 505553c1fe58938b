"""The page for people, and the page of the REST API. They hold no data, so anybody may load them."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Header, Response

from bexp.api.refusals import ProblemException
from bexp.api.web.assets import HEADERS, read_assets

router = APIRouter(include_in_schema=False)

IfNoneMatch = Annotated[str | None, Header()]


@router.api_route("/", methods=["GET", "HEAD"])
async def read_page(if_none_match: IfNoneMatch = None) -> Response:
    """The page."""
    return _send("index.html", if_none_match)


@router.api_route("/docs", methods=["GET", "HEAD"])
async def read_docs(if_none_match: IfNoneMatch = None) -> Response:
    """The page of the REST API."""
    return _send("docs.html", if_none_match)


@router.api_route("/web/{name}", methods=["GET", "HEAD"])
async def read_asset(name: str, if_none_match: IfNoneMatch = None) -> Response:
    """A script or a style sheet of the pages."""
    if name not in read_assets() or name.endswith(".html"):
        raise ProblemException(HTTPStatus.NOT_FOUND, "The page has no such file.")
    return _send(name, if_none_match)


def _send(name: str, if_none_match: str | None) -> Response:
    asset = read_assets()[name]
    headers = HEADERS | {"ETag": asset.etag}
    if if_none_match is not None and asset.etag in if_none_match:
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(asset.body, media_type=asset.media_type, headers=headers)
