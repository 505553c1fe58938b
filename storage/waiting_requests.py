"""The requests of the jobs that wait for a worker, for a worker that looks at a request before it claims the job."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa
from pydantic import ValidationError

from bexp.explorer.spec.request import ExplorationRequest
from bexp.storage.changes import has_no_worker
from bexp.storage.database import Database
from bexp.storage.tables import jobs


def list_waiting_ids(database: Database, target: str) -> list[str]:
    """Return the ids of the jobs of `target` that no worker owns."""
    with database.read() as connection:
        query = sa.select(jobs.c.id).where(has_no_worker(database), jobs.c.target == target)
        return list(connection.scalars(query))


def read_requests(database: Database, job_ids: Collection[str]) -> dict[str, ExplorationRequest | None]:
    """Return the requests of these jobs by id; None where another version stored what this one cannot read."""
    with database.read() as connection:
        rows = connection.execute(sa.select(jobs.c.id, jobs.c.request).where(jobs.c.id.in_(job_ids))).all()
    return {row.id: _parse(row.request) for row in rows}


def _parse(document: object) -> ExplorationRequest | None:
    try:
        return ExplorationRequest.model_validate(document)
    except ValidationError:
        return None
