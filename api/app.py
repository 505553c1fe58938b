"""The application: routes, errors and middleware put together.

Errors are problem details (RFC 9457): all have one shape, and none repeats the input.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import cache
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema
from sqlalchemy.exc import ProgrammingError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from bexp.api import examples
from bexp.api.auth import authorize
from bexp.api.deadlines import DeadlineMiddleware
from bexp.api.metrics import LatencyMiddleware, Metrics
from bexp.api.problem_responses import problem_response, refused
from bexp.api.refusals import (
    MAX_ERRORS,
    MAX_MESSAGE,
    REFUSED,
    FieldError,
    Problem,
    ProblemException,
    database_unavailable,
    invalid_parameter,
    readable,
    refusal_of,
)
from bexp.api.resources import Notes, QuotaLimits
from bexp.api.routes import (
    administration,
    explorations,
    logs,
    monitoring,
    results,
    schemas,
    web,
    workers,
)
from bexp.api.service import refuse_changes_if_outdated, run_service
from bexp.api.settings import ServiceSettings
from bexp.api.turns import TurnMiddleware
from bexp.explorer.model.base import rule_of
from bexp.explorer.model.spelling import did_you_mean, shortened
from bexp.explorer.request.request import ExplorationRequest
from bexp.storage.database import DATABASE_TROUBLE

DESCRIPTION = """\
Submit the configuration of a language model. Workers measure what a trainer can choose (micro-batch size, batch \
tiling on attention, recomputation, attention and expert kernels) and stream recommendations, each with a confidence.

Every error is a problem document (RFC 9457).
"""

COMMON_PROBLEMS = examples.problems(
    "/v1/explorations",
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.FORBIDDEN,
    HTTPStatus.NOT_ACCEPTABLE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.SERVICE_UNAVAILABLE,
)


async def refuse_unknown_parameters(request: Request) -> None:
    """Raise a 422 that names the first query parameter that the route of `request` does not take."""
    if not request.query_params:
        return
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    known = set(_parameters(route.dependant))
    for name in request.query_params:
        if name not in known:
            raise invalid_parameter(shortened(name), f"is no parameter of this route{did_you_mean(name, known)}")


def _parameters(dependant: Dependant) -> Iterator[str]:
    for field in dependant.query_params:
        yield field.alias
    for inner in dependant.dependencies:
        yield from _parameters(inner)


def _include_all() -> APIRouter:
    """Return all routes. FastAPI prepares them at the first request; applications that share them do so once.

    They know no application, so an application's `dependency_overrides` do not reach them.
    """
    # A route's name is what a generated client calls the function.
    routes = APIRouter(generate_unique_id_function=lambda route: route.name)
    v1_rules = [Depends(authorize), Depends(refuse_changes_if_outdated), Depends(refuse_unknown_parameters)]
    for module in (explorations, results, logs, workers, administration, schemas):
        routes.include_router(module.router, dependencies=v1_rules, responses=COMMON_PROBLEMS)
    routes.include_router(monitoring.router)
    routes.include_router(web.router)
    return routes


ROUTES = _include_all()


def create_app(settings: ServiceSettings) -> FastAPI:
    """Return an application that opens the database when it starts and closes it when it stops."""
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with run_service(settings, metrics) as service:
            app.state.service = service
            yield

    app = FastAPI(
        lifespan=lifespan,
        openapi_url=None,  # FastAPI's own route encodes the document anew for each request
        docs_url=None,  # FastAPI's own pages load their scripts from another host; `web` has a page of its own
        redoc_url=None,
        redirect_slashes=False,
        routes=ROUTES.routes,
    )
    app.add_middleware(TurnMiddleware, settings=settings)
    app.add_middleware(DeadlineMiddleware, seconds=settings.answer_seconds)
    app.add_middleware(LatencyMiddleware, metrics=metrics)
    install_problem_handlers(app)
    app.openapi = describe_api  # type: ignore[method-assign]  # FastAPI's way to replace it
    web.add_openapi(app)
    return app


@cache
def describe_api() -> dict[str, Any]:
    """Return the OpenAPI document, which all applications share: it is read, and never changed."""
    document = get_openapi(
        title="bexp",
        summary="Automatic batch-size exploration",
        description=DESCRIPTION,
        version=version("bexp"),
        routes=ROUTES.routes,
    )
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's, for which this has problem documents
        schemas.pop(name, None)
    _, definitions = models_json_schema(
        [
            (Problem, "serialization"),
            (ExplorationRequest, "validation"),
            (QuotaLimits, "validation"),
            (Notes, "validation"),
        ],
        ref_template="#/components/schemas/{model}",
    )
    for name, schema in definitions["$defs"].items():
        schemas.setdefault(name, schema)
    for item in document["paths"].values():
        for operation in item.values():
            _drop_default_error(operation["responses"])
    return document


def _drop_default_error(responses: dict[str, Any]) -> None:
    if "application/json" in responses.get("422", {}).get("content", {}):
        del responses["422"]


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
