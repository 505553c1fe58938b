"""Jobs as they are read, one by one and in lists; each is one exploration. `bexp.storage.queue` changes them."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from enum import StrEnum
from types import SimpleNamespace
from typing import Any, TypeVar

import sqlalchemy as sa
from pydantic import BaseModel, ValidationError

from bexp.explorer.model.base import rule_of
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.recommendation import Answer, Recommendation
from bexp.explorer.request.request import ExplorationRequest
from bexp.storage.database import Database
from bexp.storage.tables import jobs, labels

Model = TypeVar("Model", bound=BaseModel)


class JobState(StrEnum):
    """The state of a job."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether nothing runs or waits. A cancelled or failed job can be resumed; a succeeded one never changes."""
        return self in {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}


class JobNotFoundError(LookupError):
    """No job has this id."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"no exploration has the id '{job_id}'")
        self.job_id = job_id


@dataclass(frozen=True, slots=True)
class JobSummary:
    """A job in a list. It is read from columns of its own, so no stored document is parsed for it.

    `own_worker` is the name of the only worker that may take it, which a command has started; empty if any may.
    """

    id: str
    state: JobState
    owner: str
    priority: int
    model_name: str
    device_name: str | None
    micro_batch_size: int | None
    performance: float | None
    tokens_per_second: float | None
    rate_unit: str | None
    confidence: int | None
    confidence_target: int | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    cancel_requested: bool
    waiting_reason: str | None
    error: str | None
    reused_from: str | None
    measured_at: datetime | None
    own_worker: str
    last_seq: int
    version: int
    labels: Mapping[str, str]


SUMMARY_COLUMNS = tuple(jobs.c[part.name] for part in fields(JobSummary) if part.name != "labels")


@dataclass(frozen=True, slots=True)
class Job(JobSummary):
    """One exploration. `version` grows with every visible change; `last_seq` is its latest event.

    `reused_from` is the exploration that measured the answer at `measured_at`; None if this one measured it.
    """

    attempt: int
    worker: str | None
    lease_expires_at: datetime | None
    notes: str | None
    software: str | None
    """The target and the libraries that all claims measured with; None if a version changed between two claims."""
    space: dict[str, Any] | None
    request: ExplorationRequest | None
    report: DeviceReport | None
    recommendation: Recommendation | None
    answer: Answer | None
    unreadable: str | None
    """The first part that another version of this program stored and this one cannot read; that part is None."""


_PARSED = {"state", "labels", "request", "report", "recommendation", "answer", "unreadable"}
_PLAIN = tuple(part.name for part in fields(Job) if part.name not in _PARSED)


def get_job(database: Database, job_id: str, *, owner: str | None = None) -> Job:
    """Read one job; with `owner`, only if it belongs to that owner.

    Raises:
        JobNotFoundError: there is none with this id.
    """
    with database.read() as connection:
        row = select_row(connection, job_id, owner=owner)
    return job_from_row(row)


def get_summary(database: Database, job_id: str, *, owner: str | None = None) -> JobSummary:
    """Read the summary of one job; with `owner`, only if it belongs to that owner.

    Raises:
        JobNotFoundError: there is none with this id.
    """
    with database.read() as connection:
        rows = connection.execute(sa.select(*SUMMARY_COLUMNS).where(*_is(job_id, owner))).all()
        if not rows:
            raise JobNotFoundError(job_id)
        return summaries_of(connection, rows)[0]


def select_row(connection: sa.Connection, job_id: str, *, lock: bool = False, owner: str | None = None) -> sa.Row[Any]:
    """Return the row of a job for `job_from_row`, which then parses it after the transaction.

    Raises:
        JobNotFoundError: there is none with this id.
    """
    query = sa.select(jobs).where(*_is(job_id, owner))
    row = connection.execute(query.with_for_update() if lock else query).one_or_none()
    if row is None:
        raise JobNotFoundError(job_id)
    return row


def job_from_row(row: sa.Row[Any] | SimpleNamespace, request: ExplorationRequest | None = None) -> Job:
    """Return the job in a row that holds every column of the table.

    `request` is that of the row, if the caller has it. This function validates documents of any size, so call it after
    the transaction that read the row.
    """
    problems: list[str] = []

    def parse(model: type[Model], name: str) -> Model | None:
        document = getattr(row, name)
        try:
            return None if document is None else model.model_validate(document)
        except ValidationError as error:
            problems.append(describe_unreadable(name, error))
            return None

    request = request or parse(ExplorationRequest, "request")
    report, answer = parse(DeviceReport, "report"), parse(Answer, "answer")
    best = parse(Recommendation, "recommendation") if answer is None else answer.recommendation
    return Job(
        **{name: getattr(row, name) for name in _PLAIN},
        state=JobState(row.state),
        labels={} if request is None else request.labels,
        request=request,
        report=report,
        recommendation=best,
        answer=answer,
        unreadable=problems[0] if problems else None,
    )


def describe_unreadable(name: str, error: ValidationError) -> str:
    """Return the reason why a stored document cannot be read: its first field that breaks a rule, and the rule."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in (name, *first["loc"]))
    return f"another version stored what this one cannot read: {field}: {rule_of(first)}"


def summaries_of(connection: sa.Connection, rows: Sequence[sa.Row[Any]]) -> list[JobSummary]:
    """Return the jobs in rows of `SUMMARY_COLUMNS`, with their labels."""
    labels_of: dict[str, dict[str, str]] = {row.id: {} for row in rows}
    query = sa.select(labels).where(labels.c.job_id.in_(labels_of)).order_by(labels.c.key)
    for label in connection.execute(query) if labels_of else ():
        labels_of[label.job_id][label.key] = label.value
    return [JobSummary(**row._asdict() | {"state": JobState(row.state), "labels": labels_of[row.id]}) for row in rows]


def _is(job_id: str, owner: str | None) -> list[sa.ColumnElement[bool]]:
    return [jobs.c.id == job_id, *([] if owner is None else [jobs.c.owner == owner])]


class InvalidCursorError(ValueError):
    """The page cursor is not one that `list_jobs` gave out."""


@dataclass(frozen=True, slots=True)
class JobFilter:
    """The filter of a list: a job is listed if it meets every part that is given.

    A job has all of `labels`, and may have others. Each word of `search` stands in its model's name, its device, its
    owner or a label, in upper or lower case, or its id begins with the word. SQLite compares letters beyond ASCII in
    their own case.
    """

    state: JobState | None = None
    model: str | None = None
    labels: tuple[tuple[str, str], ...] = ()
    owner: str | None = None
    search: str = ""

    def conditions(self) -> list[sa.ColumnElement[bool]]:
        """Return the conditions on a row of `jobs`."""
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


FEWEST_OF_AN_ID = 4
"""A word of fewer characters finds no id: many would begin with it."""


def _has_word(word: str) -> sa.ColumnElement[bool]:
    """Return the condition of a word of a search. Each part reads an index alone, and no row with its documents."""
    searched = jobs.alias()
    columns = (searched.c.model_name, searched.c.device_name, searched.c.owner)
    named = sa.select(searched.c.id).where(sa.or_(*(column.icontains(word, autoescape=True) for column in columns)))
    text = labels.c.key + "=" + labels.c.value
    labelled = sa.select(labels.c.job_id).where(text.icontains(word, autoescape=True))
    found = jobs.c.id.in_(named) | jobs.c.id.in_(labelled)
    if len(word) < FEWEST_OF_AN_ID:
        return found
    identified = sa.select(searched.c.id).where(searched.c.id.startswith(word.lower(), autoescape=True))
    return found | jobs.c.id.in_(identified)


def list_jobs(
    database: Database, wanted: JobFilter | None = None, *, limit: int = 50, cursor: str | None = None
) -> tuple[list[JobSummary], str | None]:
    """Return a page of jobs, newest first, and the cursor of the next page (None at the end).

    A cursor is a place in the order of submission. So it stays valid with any filter, and when jobs are added, changed
    or deleted.

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
