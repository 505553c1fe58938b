"""Authorization: a request needs a token, or, if the service does not require one, must come from its own user.

A token that is sent is checked, whoever sends it: a program of this user may pass on the requests of others.
A token has an owner and scopes. Each route states the scope that it needs. Explorations of other owners do not exist
for a caller.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from http import HTTPStatus
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from bexp.api.peers import Peer, peer_of
from bexp.api.rate_limits import address_key, limit_rate
from bexp.api.refusals import ProblemException
from bexp.api.service import ServiceDep
from bexp.api.settings import ServiceSettings
from bexp.client.address import is_loopback
from bexp.storage.owners import LOCAL, Caller, Scope

_TOKEN = "A bearer token is required."  # noqa: S105 - no password
_OTHER_USER = (
    "Without a token, this service serves only the user who runs it, and this connection is not known to be that "
    "user's: ask for a token of `bexp token create`, or for a start with --open."
)
_FORWARDED = (
    "The request was forwarded, and not by a proxy that this service trusts: "
    "start it with --require-token and --trusted-proxy, or do not send Forwarded or X-Forwarded-For."
)

_bearer = HTTPBearer(auto_error=False, description="A token from `bexp token create`.")


async def authorize(
    request: Request,
    service: ServiceDep,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> None:
    """Check that a request may use the service, and note its caller. All routes but the health checks depend on this.

    Raises:
        ProblemException: 401 if a token is required and missing, or if the token is not valid. 403 if the request was
            forwarded, and not by a trusted proxy. 403 without a required token if the request comes from a web page of
            another origin or from another machine, or names a host that is not this machine. 429 if the address or the
            token has sent too many requests.
    """
    settings = service.settings
    peer = peer_of(request.scope)
    origin = _origin(request, peer, settings)
    request.state.secret = None
    if not settings.require_token:
        _refuse_foreign(request, peer)
        if credentials is None and (settings.is_open or peer.is_own):
            request.state.caller = replace(LOCAL, origin=origin)
            return
    known = None if credentials is None else service.tokens.remembered(credentials.credentials)
    if known is None or known.has_expired:
        # Behind a proxy or `bexp mcp --http`, many clients have one address: a token that is known counts by itself.
        limit_rate(service.address_limiter, address_key(origin), "address")
    if credentials is None:
        raise _unauthorized(_TOKEN if settings.require_token else _OTHER_USER, "Bearer")
    token = await service.tokens.find(credentials.credentials)
    if token is None:
        raise _unauthorized("The token is not valid.", 'Bearer error="invalid_token"')
    if token.has_expired:
        detail = f"The token expired at {token.expires_at:%Y-%m-%d %H:%M:%S} UTC."
        raise _unauthorized(detail, 'Bearer error="invalid_token", error_description="The token expired"')
    limit_rate(service.token_limiter, token.name, "token")
    request.state.secret = credentials.credentials
    request.state.caller = Caller(token.owner, token.scopes, token.name, origin)


def _caller_with(scope: Scope) -> Callable[[Request], Awaitable[Caller]]:
    async def check_scope(request: Request) -> Caller:
        caller: Caller = request.state.caller
        if not caller.may(scope):
            challenge = f'Bearer error="insufficient_scope", scope="{scope}"'
            detail = f"The token lacks the scope '{scope}'."
            raise ProblemException(
                HTTPStatus.FORBIDDEN, detail, name="insufficient-scope", headers={"WWW-Authenticate": challenge}
            )
        return caller

    return check_scope


Reader = Annotated[Caller, Depends(_caller_with(Scope.READ))]
Submitter = Annotated[Caller, Depends(_caller_with(Scope.SUBMIT))]
Canceller = Annotated[Caller, Depends(_caller_with(Scope.CANCEL))]
Administrator = Annotated[Caller, Depends(_caller_with(Scope.ADMIN))]


def _origin(request: Request, peer: Peer, settings: ServiceSettings) -> str:
    """Return the client's address: that of the peer, or what a trusted proxy says. Anybody can write such a header."""
    if "forwarded" in request.headers or "x-forwarded-for" in request.headers:
        if not (settings.require_token and peer.is_among(settings.trusted_proxies)):
            raise ProblemException(HTTPStatus.FORBIDDEN, _FORWARDED, name="untrusted-proxy")
        return peer.forwards_for(request.headers, settings.trusted_proxies) or peer.address
    return peer.address


def _refuse_foreign(request: Request, peer: Peer) -> None:
    """Refuse requests of other machines, and those that a web page can send by DNS rebinding or across origins."""
    if not is_loopback(peer.address):
        raise ProblemException(HTTPStatus.FORBIDDEN, "Without --require-token, the service answers only this machine.")
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
