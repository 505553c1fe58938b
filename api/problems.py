"""Errors as problem details (RFC 9457). All errors have one shape, and none repeats the input."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Annotated

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.exc import ProgrammingError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from bexp.explorer.formats.document import FormatError
from bexp.explorer.spec.rules import rule_of
from bexp.storage.database import DATABASE_TROUBLE
from bexp.storage.jobs import JobNotFoundError
from bexp.storage.quotas import QueuedQuotaError
from bexp.storage.schema import NewerSchemaError
from bexp.storage.submission import IdempotencyConflictError

MEDIA_TYPE = "application/problem+json"
MAX_ERRORS = 100
MAX_MESSAGE = 500
QUEUED_RETRY_SECONDS = 30
OUTDATED = "A later version of this service has upgraded the database; this process takes no changes."
METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")

logger = logging.getLogger(__name__)


class FieldError(BaseModel):
    """A field and the rule that it breaks; without `field` and `pointer` (RFC 6901), the whole document breaks it."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=False)

    field: str | None = None
    pointer: Annotated[str | None, Field(description="Where the field is in the body.")] = None
    message: str


class Problem(BaseModel):
    """Problem details for HTTP APIs (RFC 9457)."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str | None = None
    instance: str | None = None
    errors: list[FieldError] | None = None


class ProblemException(Exception):  # noqa: N818 - it is a response, not a fault
    """Refuses a request with a problem document."""

    def __init__(
        self,
        status: HTTPStatus,
        detail: str,
        *,
        name: str | None = None,
        errors: Iterable[FieldError] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.name = name
        self.errors = list(errors)[:MAX_ERRORS]
        self.headers = headers


def invalid_body(
    errors: Iterable[tuple[tuple[str | int, ...], str]], detail: str = "The request is not one that can be explored."
) -> ProblemException:
    """Return a 422 for a body that breaks rules; each error has the location of the field in the body."""
    return ProblemException(
        HTTPStatus.UNPROCESSABLE_ENTITY,
        detail,
        name="invalid-request",
        errors=[_body_error(location, message) for location, message in errors],
    )


def invalid_parameter(name: str, message: str) -> ProblemException:
    """Return a 422 for a query parameter or a header."""
    return ProblemException(
        HTTPStatus.UNPROCESSABLE_ENTITY,
        f"{name}: {message}",
        name="invalid-parameter",
        errors=[FieldError(field=name, message=message)],
    )


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
    problem = Problem(
        type=f"urn:bexp:problem:{name}" if name else "about:blank",
        title=HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        instance=readable(request.url.path, 256),
        errors=errors or None,
    )
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

    @app.exception_handler(FormatError)
    async def unreadable_request(request: Request, error: FormatError) -> JSONResponse:
        return await refused(request, invalid_body(error.errors))

    @app.exception_handler(JobNotFoundError)
    async def unknown_job(request: Request, _error: JobNotFoundError) -> JSONResponse:
        return problem_response(
            request, HTTPStatus.NOT_FOUND, "There is no exploration with this id.", name="unknown-exploration"
        )

    @app.exception_handler(IdempotencyConflictError)
    async def other_body(request: Request, _error: IdempotencyConflictError) -> JSONResponse:
        conflict = FieldError(field="Idempotency-Key", message="was used before with a different request")
        return problem_response(
            request,
            HTTPStatus.UNPROCESSABLE_ENTITY,
            "This Idempotency-Key was used before with a different request.",
            name="idempotency-conflict",
            errors=[conflict],
        )

    @app.exception_handler(QueuedQuotaError)
    async def too_many_queued(request: Request, error: QueuedQuotaError) -> JSONResponse:
        return problem_response(
            request,
            HTTPStatus.TOO_MANY_REQUESTS,
            f"Owner '{error.owner}' has as many queued explorations as its quota 'queued' allows ({error.limit}).",
            name="quota-exceeded",
            headers={"Retry-After": str(QUEUED_RETRY_SECONDS)},
        )

    @app.exception_handler(NewerSchemaError)
    async def outdated(request: Request, _error: NewerSchemaError) -> JSONResponse:
        return problem_response(
            request, HTTPStatus.SERVICE_UNAVAILABLE, OUTDATED, name="schema-not-current", headers={"Retry-After": "30"}
        )

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


def _body_error(location: tuple[str | int, ...], message: str) -> FieldError:
    parts = [readable(str(part), 64) for part in location]
    if not parts:
        return FieldError(message=readable(message, MAX_MESSAGE))
    pointer = "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in parts)
    return FieldError(field=".".join(parts), pointer=f"#{pointer}", message=readable(message, MAX_MESSAGE))


def readable(text: str, limit: int) -> str:
    """Return `text` without control characters and lone surrogates, at most `limit` characters."""
    cleaned = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[: limit + 1])
    return cleaned if len(cleaned) <= limit else cleaned[: limit - 1] + "\N{HORIZONTAL ELLIPSIS}"
