"""The page for people, and the page of the REST API. They hold no data, so anybody may load them."""

from __future__ import annotations

import json
from functools import cache
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, FastAPI, Header, Response

from bexp.api.refusals import ProblemException
from bexp.api.web.assets import HEADERS, Asset, read_assets

router = APIRouter(include_in_schema=False)

IfNoneMatch = Annotated[str | None, Header()]


@router.api_route("/", methods=["GET", "HEAD"])
async def read_page(if_none_match: IfNoneMatch = None) -> Response:
    """The page."""
    return _send(read_assets()["index.html"], if_none_match)


@router.api_route("/docs", methods=["GET", "HEAD"])
async def read_docs(if_none_match: IfNoneMatch = None) -> Response:
    """The page of the REST API."""
    return _send(read_assets()["docs.html"], if_none_match)


@router.api_route("/llms.txt", methods=["GET", "HEAD"])
async def read_guide(if_none_match: IfNoneMatch = None) -> Response:
    """What an agent should know of the service."""
    return _send(read_assets()["llms.txt"], if_none_match)


@router.api_route("/web/{name}", methods=["GET", "HEAD"])
async def read_asset(name: str, if_none_match: IfNoneMatch = None) -> Response:
    """A script or a style sheet of the pages."""
    if name not in read_assets() or name.endswith(".html"):
        raise ProblemException(HTTPStatus.NOT_FOUND, "The page has no such file.")
    return _send(read_assets()[name], if_none_match)


def add_openapi(app: FastAPI) -> None:
    """Give `app` the route of its own description, which is encoded once."""

    @cache
    def describe() -> Asset:
        return Asset.of(json.dumps(app.openapi(), separators=(",", ":")).encode(), "application/json")

    @app.api_route("/openapi.json", methods=["GET", "HEAD"], include_in_schema=False)
    async def read_openapi(if_none_match: IfNoneMatch = None) -> Response:
        return _send(describe(), if_none_match)


def _send(asset: Asset, if_none_match: str | None) -> Response:
    headers = HEADERS | {"ETag": asset.etag}
    if if_none_match is not None and asset.etag in if_none_match:
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(asset.body, media_type=asset.media_type, headers=headers)
