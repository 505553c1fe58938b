"""The audit and the quotas, for those who administer the service."""

from __future__ import annotations

from dataclasses import asdict
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Query

from bexp.api import bodies, examples
from bexp.api.auth import Administrator
from bexp.api.refusals import ProblemException
from bexp.api.resources import NO_NUL, AuditPage, AuditResource, QuotaLimits, QuotaList, QuotaResource
from bexp.api.service import ServiceDep, body_text
from bexp.storage.audit import read_audit
from bexp.storage.owners import check_name
from bexp.storage.quotas import EVERYBODY, Quota, list_quotas, quota_of, set_quota

router = APIRouter(prefix="/v1", tags=["administration"], dependencies=[Depends(bodies.accepts_json)])

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
    """Submissions, cancels, resumes, deletions and notes; changes of tokens and quotas. The newest comes first."""
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
    openapi_extra=bodies.described("QuotaLimits", examples.LIMITS),
)
def put_quota(
    caller: Administrator,
    owner: OwnerDep,
    text: Annotated[str, Depends(body_text(MAX_QUOTA_BYTES))],
    service: ServiceDep,
) -> QuotaResource:
    """Replace the quota of an owner, or of `*`. A limit that is left out is none; without any, the quota is removed."""
    quota = Quota(**bodies.parse_body(QuotaLimits, text, "This is no quota.").model_dump())
    set_quota(service.database, owner, None if quota == Quota() else quota, by=caller)
    return show_quota(caller, owner, service)
