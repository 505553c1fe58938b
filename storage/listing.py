"""Lists of jobs: by state, model, labels and words, page by page."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from datetime import UTC, datetime

import sqlalchemy as sa

from bexp.storage.database import Database
from bexp.storage.jobs import SUMMARY_COLUMNS, JobState, JobSummary, summaries_of
from bexp.storage.tables import jobs, labels


class InvalidCursorError(ValueError):
    """A page cursor that `list_jobs` has not given out."""


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Which jobs to list: those that meet every part that is given. A job has all of `labels`, and may have others.

    Each word of `search`, whatever its case, is somewhere in its model's name, its device, its owner or a label. On
    SQLite that holds for ASCII letters; others are found in their own case.
    """

    state: JobState | None = None
    model: str | None = None
    labels: tuple[tuple[str, str], ...] = ()
    owner: str | None = None
    search: str = ""

    def conditions(self) -> list[sa.ColumnElement[bool]]:
        """Return what a row of `jobs` must meet."""
        conditions: list[sa.ColumnElement[bool]] = []
        if self.state is not None:
            conditions.append(jobs.c.state == self.state.value)
        if self.model is not None:
            conditions.append(jobs.c.model_name == self.model)
        if self.owner is not None:
            conditions.append(jobs.c.owner == self.owner)
        for key, value in self.labels:
            labelled = sa.select(labels.c.job_id).where(labels.c.key == key, labels.c.value == value)
            conditions.append(jobs.c.id.in_(labelled))
        return conditions + [_has_word(word) for word in dict.fromkeys(self.search.split())]


def _has_word(word: str) -> sa.ColumnElement[bool]:
    """Return the condition of a word of a search. Each part reads an index alone, and no row with its documents."""
    searched = jobs.alias()
    columns = (searched.c.model_name, searched.c.device_name, searched.c.owner)
    named = sa.select(searched.c.id).where(sa.or_(*(column.icontains(word, autoescape=True) for column in columns)))
    text = labels.c.key + "=" + labels.c.value
    labelled = sa.select(labels.c.job_id).where(text.icontains(word, autoescape=True))
    return jobs.c.id.in_(named) | jobs.c.id.in_(labelled)


def list_jobs(
    database: Database, wanted: JobFilter | None = None, *, limit: int = 50, cursor: str | None = None
) -> tuple[list[JobSummary], str | None]:
    """Return a page of jobs, newest first, and the cursor of the next page (None at the end).

    A cursor is a place in the order of submission. So it stays good when jobs are added, changed or deleted, and
    whatever the filter is.

    Raises:
        InvalidCursorError: `cursor` is not one that this function gave out.
    """
    query = sa.select(*SUMMARY_COLUMNS).order_by(jobs.c.created_at.desc(), jobs.c.id.desc()).limit(limit + 1)
    query = query.where(*(wanted or JobFilter()).conditions())
    if cursor is not None:
        created_at, job_id = _parse_cursor(cursor)
        older = jobs.c.created_at < created_at
        query = query.where(older | ((jobs.c.created_at == created_at) & (jobs.c.id < job_id)))
    with database.read() as connection:
        rows = connection.execute(query).all()
        page = summaries_of(connection, rows[:limit])
    return page, (_cursor_after(page[-1]) if len(rows) > limit else None)


def latest_events(database: Database) -> dict[str, int]:
    """Return the seq of the latest event of every job."""
    with database.read() as connection:
        return {row.id: row.last_seq for row in connection.execute(sa.select(jobs.c.id, jobs.c.last_seq))}


def _cursor_after(job: JobSummary) -> str:
    return base64.urlsafe_b64encode(f"{job.created_at.isoformat()}~{job.id}".encode()).decode()


def _parse_cursor(cursor: str) -> tuple[datetime, str]:
    try:
        moment, _, job_id = base64.urlsafe_b64decode(cursor.encode()).decode().partition("~")
        created_at = datetime.fromisoformat(moment)
        in_utc = created_at.astimezone(UTC)  # as it is compared; at the edges of the calendar there is no such time
    except (ValueError, OverflowError) as error:
        raise InvalidCursorError("the cursor is not one that this list gave out") from error
    if created_at.tzinfo is None or not job_id.isalnum():
        raise InvalidCursorError("the cursor is not one that this list gave out")
    return in_utc, job_id
