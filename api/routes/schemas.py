"""The JSON Schema of a request, for editors and for programs that make requests."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse

from bexp.api import examples
from bexp.api.bodies import accepts_json
from bexp.explorer.request.request import ExplorationRequest

router = APIRouter(prefix="/v1", tags=["explorations"], dependencies=[Depends(accepts_json)])


@router.get(
    "/schema",
    summary="JSON Schema of a request",
    responses={200: examples.example({"title": "ExplorationRequest", "type": "object", "properties": {}})},
)
def read_schema() -> JSONResponse:
    """The JSON Schema of a request (draft 2020-12)."""
    schema: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **ExplorationRequest.model_json_schema(),
    }
    return JSONResponse(schema)
