"""Health checks and metrics, for those who run the service."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter, Depends, Response
from sqlalchemy.exc import SQLAlchemyError

from bexp.api import examples, metrics
from bexp.api.auth import Reader, authorize
from bexp.api.refusals import ProblemException
from bexp.api.resources import Health
from bexp.api.service import ServiceDep
from bexp.storage.schema import is_current

router = APIRouter(tags=["monitoring"])


def _unready(detail: str, name: str) -> ProblemException:
    return ProblemException(HTTPStatus.SERVICE_UNAVAILABLE, detail, name=name, headers={"Retry-After": "2"})


@router.get("/healthz", summary="Alive", responses={200: examples.example({"status": "alive"})})
async def healthz() -> Health:
    """The process answers."""
    return Health(status="alive")


@router.get(
    "/readyz",
    summary="Ready",
    responses={
        200: examples.example({"status": "ready"}),
        **examples.problems("/readyz", HTTPStatus.SERVICE_UNAVAILABLE),
    },
)
def readyz(service: ServiceDep) -> Health:
    """The database takes writes, its schema is that of this version, and the background tasks do their work.

    Workers do not matter here: submissions wait for them in the queue.
    """
    try:
        current = is_current(service.database)
    except SQLAlchemyError:
        raise _unready("The database does not answer.", "database-unavailable") from None
    if not current:
        detail = "The database's schema is not the one of this version: run `bexp db upgrade`."
        raise ProblemException(HTTPStatus.SERVICE_UNAVAILABLE, detail, name="schema-not-current")
    try:
        service.write_probe.check()
    except SQLAlchemyError:
        raise _unready("The database takes no writes.", "database-unavailable") from None
    if (trouble := service.supervisor.find_trouble()) is not None:
        raise _unready(f"{trouble}.", "background-task-failed")
    return Health(status="ready")


# Some load balancers ask by HEAD.
router.add_api_route("/healthz", healthz, methods=["HEAD"], include_in_schema=False)
router.add_api_route("/readyz", readyz, methods=["HEAD"], include_in_schema=False)


@router.get(
    "/metrics",
    response_class=Response,
    dependencies=[Depends(authorize)],
    summary="Counts for Prometheus",
    responses={
        200: examples.example(examples.METRICS, "text/plain"),
        **examples.problems(
            "/metrics",
            HTTPStatus.UNAUTHORIZED,
            HTTPStatus.FORBIDDEN,
            HTTPStatus.TOO_MANY_REQUESTS,
            HTTPStatus.SERVICE_UNAVAILABLE,
        ),
    },
)
def read_metrics(service: ServiceDep, _caller: Reader) -> Response:
    """Explorations by state with their waits and durations, workers, trials by outcome, request latency."""
    troubled = service.supervisor.find_trouble() is not None
    text = service.metrics.render(service.database, service.feed.num_watchers, is_troubled=troubled)
    return Response(text, media_type=metrics.MEDIA_TYPE)
