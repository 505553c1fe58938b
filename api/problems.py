"""Errors as problem details (RFC 9457). All errors have one shape, and none repeats the input."""

from __future__ import annotations

import logging
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import ProgrammingError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from bexp.api.problem_responses import problem_response, refused
from bexp.api.refusals import (
    MAX_ERRORS,
    MAX_MESSAGE,
    REFUSED,
    FieldError,
    ProblemException,
    database_unavailable,
    readable,
    refusal_of,
)
from bexp.explorer.model.base import rule_of
from bexp.storage.database import DATABASE_TROUBLE

METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")

logger = logging.getLogger(__name__)


def install_problem_handlers(app: FastAPI) -> None:
    """Answer every error of `app` with a problem document."""

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

    async def refuse(request: Request, error: Exception) -> JSONResponse:
        refusal = refusal_of(error)
        assert refusal is not None, "only what refusal_of knows has this handler"
        return refused(request, refusal)

    for kind in (ProblemException, *REFUSED):
        app.add_exception_handler(kind, refuse)

    async def no_database(request: Request, error: Exception) -> JSONResponse:
        logger.warning("the database failed: %s", getattr(error, "orig", error))
        return refused(request, database_unavailable())

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
