"""Authorization: a request needs a token, or, if the service does not require one, must come from this machine."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated
from urllib.parse import urlsplit

from anyio.to_thread import run_sync
from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from api.problems import ProblemException
from api.service import ServiceDep
from bexp.client.address import is_loopback
from storage.tokens import verify_token

_bearer = HTTPBearer(auto_error=False, description="A token from `bexp token create`.")


async def authorize(
    request: Request,
    service: ServiceDep,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> None:
    """Check that a request may use the service. Every route but the health checks depends on this.

    Raises:
        ProblemException: 401 if a token is required and the request has no valid one. 403 if no token is required, and
            a web page of another origin sent the request, or it used a name that is not one of this machine.
    """
    if not service.settings.require_token:
        _refuse_foreign(request)
        return
    if credentials is None:
        raise _unauthorized("A bearer token is required.", "Bearer")
    if await run_sync(verify_token, service.database, credentials.credentials) is None:
        raise _unauthorized("The token is not valid.", 'Bearer error="invalid_token"')


def _refuse_foreign(request: Request) -> None:
    """Refuse requests that a web page can send to the loopback interface, by DNS rebinding or across origins."""
    if not is_loopback(_host_name(f"//{request.headers.get('host', '')}")):
        raise ProblemException(
            HTTPStatus.FORBIDDEN,
            "Without --require-token, the service answers only requests to a loopback name such as localhost; "
            "behind a proxy, start it with --require-token.",
        )
    # A page of another port of this machine is another origin: any local program may serve it.
    origin = request.headers.get("origin")
    if origin is not None and origin.lower() != f"{request.url.scheme}://{request.headers.get('host', '').lower()}":
        raise ProblemException(HTTPStatus.FORBIDDEN, "Pages of other origins may not use the service.")


def _host_name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _unauthorized(detail: str, challenge: str) -> ProblemException:
    return ProblemException(HTTPStatus.UNAUTHORIZED, detail, headers={"WWW-Authenticate": challenge})
