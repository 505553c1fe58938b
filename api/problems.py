"""Errors as problem details (RFC 9457). All errors have one shape, and none repeats the input."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import ProgrammingError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from bexp.api.refusals import (
    MAX_ERRORS,
    MAX_MESSAGE,
    REFUSED,
    FieldError,
    Problem,
    ProblemException,
    readable,
    refusal_of,
)
from bexp.explorer.spec.base import rule_of
from bexp.storage.database import DATABASE_TROUBLE

MEDIA_TYPE = "application/problem+json"
METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")

logger = logging.getLogger(__name__)


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


def database_unavailable(request: Request) -> JSONResponse:
    """Return the response while the database does not do its work."""
    return problem_response(
        request,
        HTTPStatus.SERVICE_UNAVAILABLE,
        "The database does not answer as it should; /readyz and the service's log say more.",
        name="database-unavailable",
        headers={"Retry-After": "2"},
    )


def install_problem_handlers(app: FastAPI) -> None:
    """Answer every error of `app` with a problem document."""

    @app.exception_handler(ProblemException)
    async def refused(request: Request, error: ProblemException) -> JSONResponse:
        return problem_response(
            request, error.status, error.detail, name=error.name, errors=error.errors, headers=error.headers
        )

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        detail = error.detail if error.detail != HTTPStatus(error.status_code).phrase else None
        headers = error.headers
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            headers = {**(headers or {}), "Allow": ", ".join(_methods_of(request))}
        return problem_response(request, error.status_code, detail, headers=headers)

    @app.exception_handler(RequestValidationError)
    async def invalid_parameters(request: Request, error: RequestValidationError) -> JSONResponse:
        errors = [
            FieldError(field=".".join(str(part) for part in e["loc"][1:]), message=readable(rule_of(e), MAX_MESSAGE))
            for e in error.errors()[:MAX_ERRORS]
        ]
        return problem_response(
            request,
            HTTPStatus.UNPROCESSABLE_ENTITY,
            "; ".join(f"{e.field}: {e.message}" for e in errors),
            name="invalid-parameter",
            errors=errors,
        )

    async def refused_elsewhere(request: Request, error: Exception) -> JSONResponse:
        refusal = refusal_of(error)
        assert refusal is not None, "only what refusal_of knows has this handler"
        return await refused(request, refusal)

    for kind in REFUSED:
        app.add_exception_handler(kind, refused_elsewhere)

    async def no_database(request: Request, error: Exception) -> JSONResponse:
        logger.warning("the database failed: %s", getattr(error, "orig", error))
        return database_unavailable(request)

    for trouble in (*DATABASE_TROUBLE, ProgrammingError):  # the last: PostgreSQL without our tables
        app.add_exception_handler(trouble, no_database)

    @app.exception_handler(ClientDisconnect)
    async def client_left(request: Request, _error: ClientDisconnect) -> JSONResponse:
        logger.warning("a client left before it had sent its request: %s", readable(request.url.path, 256))
        return problem_response(request, HTTPStatus.BAD_REQUEST, "The request is incomplete.")

    @app.exception_handler(Exception)
    async def fault(request: Request, _error: Exception) -> JSONResponse:
        return problem_response(request, HTTPStatus.INTERNAL_SERVER_ERROR, "The service failed; its log says why.")


def _methods_of(request: Request) -> list[str]:
    """Return the methods of all routes for the path of `request`: Starlette names those of the first route alone."""
    scopes = {method: {**request.scope, "method": method} for method in METHODS}
    routes = request.app.routes
    return [method for method, scope in scopes.items() if any(r.matches(scope)[0] is Match.FULL for r in routes)]
