"""The resources of the routes of administration: the audit, and quotas."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from bexp.api.resources import NextCursor
from bexp.storage.audit import Action

QuotaLimit = Annotated[int, Field(ge=0, le=2_000_000_000)] | None
QuotaBytes = Annotated[int, Field(ge=0, le=1 << 50)] | None


class AuditResource(BaseModel):
    """An action and its caller, with the caller's `owner`, `token` and `origin`."""

    at: datetime
    action: Action
    subject: Annotated[str, Field(description="The id of an exploration, or the name of a token or an owner.")]
    owner: str
    token: Annotated[str | None, Field(description="Its name; null without a token.")]
    origin: Annotated[str | None, Field(description="The client's address, or user and host of a command.")]


class AuditPage(BaseModel):
    """Records of the audit, the newest first."""

    items: list[AuditResource]
    next_cursor: NextCursor


class QuotaLimits(BaseModel):
    """The limits of an owner; null is no limit."""

    model_config = ConfigDict(extra="forbid", strict=True)

    max_queued: QuotaLimit = Field(None, description="Explorations in the queue.")
    max_running: QuotaLimit = Field(None, description="Explorations that run at the same time.")
    max_stored_bytes: QuotaBytes = Field(None, description="Bytes of explorations in the database; null is 1 GB.")


class QuotaResource(QuotaLimits):
    """The quota of an owner."""

    owner: str
    inherited: Annotated[bool, Field(description="Whether it is that of `*`, because the owner has none of its own.")]


class QuotaList(BaseModel):
    """The quotas that are set, in the order of the owners' names."""

    items: list[QuotaResource]
