"""The page for people, and the page of the REST API. They hold no data, so anybody may load them."""

from __future__ import annotations

import json
import re
import threading
from functools import cache
from http import HTTPStatus

from fastapi import APIRouter, FastAPI, Request, Response

from bexp.api.refusals import ProblemException
from bexp.api.web.assets import HEADERS, Asset, read_assets

router = APIRouter(include_in_schema=False)


@router.api_route("/", methods=["GET", "HEAD"])
async def read_page(request: Request) -> Response:
    """The page."""
    return _send(read_assets()["index.html"], request)


@router.api_route("/docs", methods=["GET", "HEAD"])
async def read_docs(request: Request) -> Response:
    """The page of the REST API."""
    return _send(read_assets()["docs.html"], request)


@router.api_route("/llms.txt", methods=["GET", "HEAD"])
async def read_guide(request: Request) -> Response:
    """A guide to the service for agents."""
    return _send(read_assets()["llms.txt"], request)


@router.api_route("/web/{name}", methods=["GET", "HEAD"])
async def read_asset(name: str, request: Request) -> Response:
    """A script or a style sheet of the pages."""
    if name not in read_assets() or name.endswith(".html"):
        raise ProblemException(HTTPStatus.NOT_FOUND, "The page has no such file.")
    return _send(read_assets()[name], request)


def add_openapi(app: FastAPI) -> None:
    """Give `app` the route of its own description, which is encoded once."""
    encoding = threading.Lock()

    @cache
    def describe() -> Asset:
        return Asset.of(json.dumps(app.openapi(), separators=(",", ":")).encode(), "application/json")

    @app.api_route("/openapi.json", methods=["GET", "HEAD"], include_in_schema=False)
    def read_openapi(request: Request) -> Response:  # in a thread: the first time takes 0.3 s, for which others go on
        with encoding:
            asset = describe()
        return _send(asset, request)


_GZIP = re.compile(r"\bgzip\b(?!\s*;\s*q=0(?:\.0*)?\s*(?:,|$))")


def _send(asset: Asset, request: Request) -> Response:
    takes_gzip = _GZIP.search(request.headers.get("accept-encoding", "")) is not None
    headers = HEADERS | {"ETag": f'"{asset.digest}{"-gzip" if takes_gzip else ""}"'}
    if asset.digest in request.headers.get("if-none-match", ""):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    if takes_gzip:
        return Response(asset.packed, media_type=asset.media_type, headers=headers | {"Content-Encoding": "gzip"})
    return Response(asset.body, media_type=asset.media_type, headers=headers)
