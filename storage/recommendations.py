"""What was recommended when: a row whenever that changes, and shorter documents for the events that say it.

An event holds what the recommendation says of its candidate. How it compares with other candidates stands in the job's
latest recommendation and in its answer, with its notes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from bexp.explorer.records.recommendation import Recommendation
from bexp.storage.tables import events, recommendations

_COMPARED = ("alternatives", "dividing_batch_sizes", "notes")
_OF_PLAN = ("plain", "parts", "picture")
_LEFT_OUT: dict[str, Any] = {**dict.fromkeys(_COMPARED, True), "plan": set(_OF_PLAN)}
"""Fields of a recommendation, and of its plan, that are left out of events."""


def insert_if_changed(connection: sa.Connection, job_id: str, seq: int, best: Recommendation | None) -> None:
    """Insert a row that `best` is recommended since the event `seq`, unless the last row of the job says the same.

    The caller holds the lock of the job's row.
    """
    if best is None:
        return
    of_job = recommendations.c.job_id == job_id
    last = connection.execute(
        sa.select(recommendations).where(of_job).order_by(recommendations.c.seq.desc()).limit(1)
    ).one_or_none()
    values = {**best.figures._asdict(), "candidate": best.candidate.model_dump(mode="json", exclude_none=True)}
    if last is not None and all(getattr(last, name) == value for name, value in values.items()):
        return
    at = sa.select(events.c.at).where(events.c.job_id == job_id, events.c.seq == seq).scalar_subquery()
    connection.execute(sa.insert(recommendations).values(job_id=job_id, seq=seq, at=at, **values))


def shorten(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an event stores of a recommendation: what is not the default of its field."""
    best = Recommendation.model_validate(document)
    return best.model_dump(mode="json", exclude=_LEFT_OUT, exclude_defaults=True)


def restore(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document that `shorten` was given, without what is left out."""
    return Recommendation.model_validate(stored).model_dump(mode="json")
