"""The audit and the quotas, for those who administer the service."""

from __future__ import annotations

from dataclasses import asdict
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from pydantic import ValidationError

from bexp.api import bodies, examples
from bexp.api.administration import AuditPage, AuditResource, QuotaLimits, QuotaList, QuotaResource
from bexp.api.auth import Administrator
from bexp.api.negotiation import accepts_json
from bexp.api.refusals import ProblemException, invalid_body
from bexp.api.resources import NO_NUL
from bexp.api.service import ServiceDep
from bexp.explorer.formats.document import load_document
from bexp.explorer.model.base import rule_of
from bexp.storage.audit import read_audit
from bexp.storage.owners import check_name
from bexp.storage.quotas import EVERYBODY, Quota, list_quotas, quota_of, set_quota

router = APIRouter(prefix="/v1", tags=["administration"], dependencies=[Depends(accepts_json)])

MAX_QUOTA_BYTES = 4 * 1024

_QUOTA = "/v1/owners/team-a/quota"
_NO_OWNER = examples.problems(
    "/v1/owners/-/quota",
    HTTPStatus.NOT_FOUND,
    type="urn:bexp:problem:unknown-owner",
    detail="No owner can have this name.",
)


async def owner_of(owner: str) -> str:
    """Return the owner in the path, or EVERYBODY: a dependency of routes.

    Raises:
        ProblemException: 404, because no owner can have this name.
    """
    try:
        return owner if owner == EVERYBODY else check_name("an owner's name", owner)
    except ValueError as error:
        raise ProblemException(
            HTTPStatus.NOT_FOUND, f"There is no such owner: {error}.", name="unknown-owner"
        ) from None


OwnerDep = Annotated[str, Depends(owner_of)]


async def _text_of(request: Request, service: ServiceDep) -> str:
    return await bodies.read_text(request, MAX_QUOTA_BYTES, service.settings.body_seconds)


@router.get(
    "/audit",
    summary="Who did what",
    responses={
        200: examples.example(examples.AUDIT),
        **examples.problems("/v1/audit", HTTPStatus.UNPROCESSABLE_ENTITY),
    },
)
def show_audit(
    _caller: Administrator,
    service: ServiceDep,
    owner: Annotated[str | None, Query(max_length=64, pattern=NO_NUL, description="Only what this owner did.")] = None,
    cursor: Annotated[int | None, Query(ge=1, lt=1 << 63, description="`next_cursor` of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="How many.")] = 100,
) -> AuditPage:
    """Submissions, cancels, resumes and deletions of explorations, and changes of tokens and quotas, newest first."""
    records = read_audit(service.database, owner=owner, before=cursor, limit=limit + 1)
    page = records[:limit]
    items = [AuditResource.model_validate(asdict(record)) for record in page]
    return AuditPage(items=items, next_cursor=str(page[-1].id) if len(records) > limit else None)


@router.get("/quotas", summary="The quotas of all owners", responses={200: examples.example(examples.QUOTAS)})
def show_quotas(_caller: Administrator, service: ServiceDep) -> QuotaList:
    """The quotas that are set; `*` is that of each owner without one of its own."""
    quotas = list_quotas(service.database)
    return QuotaList(items=[QuotaResource(owner=name, inherited=False, **asdict(one)) for name, one in quotas.items()])


@router.get(
    "/owners/{owner}/quota",
    summary="The quota of an owner",
    responses={200: examples.example(examples.QUOTA), **_NO_OWNER},
)
def show_quota(_caller: Administrator, owner: OwnerDep, service: ServiceDep) -> QuotaResource:
    """The quota that holds for an owner: its own, or that of `*`. An owner without a quota has no limits."""
    quotas = list_quotas(service.database)
    return QuotaResource(owner=owner, inherited=owner not in quotas, **asdict(quota_of(quotas, owner)))


@router.put(
    "/owners/{owner}/quota",
    summary="Set the quota of an owner",
    responses={
        200: examples.example(examples.QUOTA),
        **examples.problems(
            _QUOTA,
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            HTTPStatus.UNPROCESSABLE_ENTITY,
        ),
        **_NO_OWNER,
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                bodies.JSON: {"schema": {"$ref": "#/components/schemas/QuotaLimits"}, "example": examples.LIMITS}
            },
        }
    },
)
def put_quota(
    caller: Administrator,
    owner: OwnerDep,
    text: Annotated[str, Depends(_text_of)],
    service: ServiceDep,
) -> QuotaResource:
    """Replace the quota of an owner, or of `*`. A limit that is left out is none; without any, the quota is removed."""
    try:
        limits = QuotaLimits.model_validate(load_document(text))
    except ValidationError as error:
        problems = [(detail["loc"], rule_of(detail)) for detail in error.errors(include_url=False, include_input=False)]
        raise invalid_body(problems, "This is no quota.") from None
    quota = Quota(**limits.model_dump())
    set_quota(service.database, owner, None if quota == Quota() else quota, by=caller)
    return show_quota(caller, owner, service)
