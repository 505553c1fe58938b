"""Whether a repeated submission asks for what the first one with its key asked for."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from pydantic import ValidationError

from bexp.explorer.spec.request import ExplorationRequest


def asks_the_same(stored: sa.Row[Any], request: ExplorationRequest, body_hash: str) -> bool:
    """Return whether the stored job's request is `request`, whose hash is `body_hash`.

    The hash covers all fields, so it differs between versions of this program that have other fields. Then both
    requests are compared as this version reads them, without what was noted about their configuration.
    """
    if stored.body_hash == body_hash:
        return True
    try:
        first = ExplorationRequest.model_validate(stored.request)
    except ValidationError:
        return False
    return _without_notices(first) == _without_notices(request)


def _without_notices(request: ExplorationRequest) -> ExplorationRequest:
    return request.model_copy(update={"notices": ()})
