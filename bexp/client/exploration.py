"""An exploration and its events, as a program sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from bexp.client.connection import JOB_ID, ServiceError

FINAL_STATES = frozenset({"succeeded", "failed", "cancelled"})


@dataclass(frozen=True)
class Exploration:
    """An exploration. `document` is all that the service says of it.

    `state` is queued, running, succeeded, failed or cancelled. `micro_batch_size` is the one recommended so far, and
    `confidence` (0 to 99) the probability in percent that it is within the tolerance of the best.
    """

    id: str
    state: str
    model: str
    micro_batch_size: int | None
    confidence: int | None
    error: str | None
    document: Mapping[str, Any]

    @property
    def is_final(self) -> bool:
        """Whether the exploration has ended."""
        return self.state in FINAL_STATES

    @classmethod
    def read(cls, document: Any) -> Exploration:
        """Read what the service answers. Raises ServiceError if it is no exploration."""
        try:
            if not JOB_ID.fullmatch(document["id"]):
                raise ServiceError("the service's exploration cannot be read: its id")
            names = ("micro_batch_size", "confidence", "error")
            return cls(
                id=document["id"],
                state=str(document["state"]),
                model=str(document["model"]),
                document=document,
                **{name: document.get(name) for name in names},
            )
        except (TypeError, KeyError) as error:
            raise ServiceError(f"the service's exploration cannot be read: {error!r}") from error


@dataclass(frozen=True)
class Event:
    """An event of an exploration's log. `code` is the number behind `BEXP` in a line; `seq` counts from 1."""

    seq: int
    code: int
    at: datetime
    message: str
    data: Mapping[str, Any]

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Event:
        """Read an event of the stream. Raises ServiceError if it is none."""
        try:
            return cls(
                seq=document["seq"],
                code=document["code"],
                at=datetime.fromisoformat(document["at"]),
                message=str(document["message"]),
                data=document.get("data") or {},
            )
        except (TypeError, ValueError, KeyError) as error:
            raise ServiceError(f"the service sent an event that cannot be read: {error!r}") from error
