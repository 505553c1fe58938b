"""Refusals as responses: problem details (RFC 9457)."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import JSONResponse

from bexp.api.refusals import FieldError, Problem, ProblemException, readable

MEDIA_TYPE = "application/problem+json"


def problem_response(
    request: Request,
    status: int,
    detail: str | None = None,
    *,
    name: str | None = None,
    errors: list[FieldError] | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """Return the response for a problem; `name` makes its type, which is `about:blank` without a name."""
    problem = Problem.of(status, detail, name=name, errors=errors, instance=readable(request.url.path, 256))
    return JSONResponse(
        problem.model_dump(mode="json", exclude_none=True), status, headers=dict(headers or {}), media_type=MEDIA_TYPE
    )


def refused(request: Request, refusal: ProblemException) -> JSONResponse:
    """Return the response that refuses a request."""
    return problem_response(
        request, refusal.status, refusal.detail, name=refusal.name, errors=refusal.errors, headers=refusal.headers
    )
