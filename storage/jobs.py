"""Jobs as they are read; each is one exploration. All changes go through `storage.queue`."""

from __future__ import annotations

import base64
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TypeVar

import sqlalchemy as sa
from pydantic import BaseModel, ValidationError

from explorer.records.recommendation import Answer, Recommendation
from explorer.spec.hardware import DeviceReport
from explorer.spec.request import ExplorationRequest
from explorer.spec.rules import rule_of
from storage.database import Database
from storage.tables import jobs

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


class InvalidCursorError(ValueError):
    """A page cursor that `list_jobs` has not given out."""


@dataclass(frozen=True, slots=True)
class JobSummary:
    """What a list shows of a job. It is read from columns of its own, so no stored document is parsed for it."""

    id: str
    state: JobState
    model_name: str
    micro_batch_size: int | None
    confidence: int | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    cancel_requested: bool
    waiting_reason: str | None
    error: str | None
    last_seq: int
    version: int


_SUMMARY = tuple(jobs.c[part.name] for part in fields(JobSummary))


@dataclass(frozen=True, slots=True)
class Job:
    """One exploration. `version` grows with every visible change; `last_seq` is its latest event.

    A part that another version of this program stored may break the rules of this version. It is then null, and
    `unreadable` names the first such part with the rule.
    """

    id: str
    state: JobState
    request: ExplorationRequest | None
    model_name: str
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    attempt: int
    owner: str | None
    lease_expires_at: datetime | None
    cancel_requested: bool
    report: DeviceReport | None
    space: dict[str, Any] | None
    recommendation: Recommendation | None
    answer: Answer | None
    error: str | None
    waiting_reason: str | None
    last_seq: int
    version: int
    unreadable: str | None


def get_job(database: Database, job_id: str) -> Job:
    """Read one job.

    Raises:
        JobNotFoundError: there is none with this id.
    """
    with database.read() as connection:
        row = select_row(connection, job_id)
    return job_from_row(row)


def get_summary(database: Database, job_id: str) -> JobSummary:
    """Read the summary of one job.

    Raises:
        JobNotFoundError: there is none with this id.
    """
    with database.read() as connection:
        row = connection.execute(sa.select(*_SUMMARY).where(jobs.c.id == job_id)).one_or_none()
    if row is None:
        raise JobNotFoundError(job_id)
    return _summary_of(row)


def list_jobs(
    database: Database, *, state: JobState | None = None, limit: int = 50, cursor: str | None = None
) -> tuple[list[JobSummary], str | None]:
    """Return a page of jobs, newest first, and the cursor of the next page (null at the end).

    Raises:
        InvalidCursorError: `cursor` is not one that this function gave out.
    """
    query = sa.select(*_SUMMARY).order_by(jobs.c.created_at.desc(), jobs.c.id.desc()).limit(limit + 1)
    if state is not None:
        query = query.where(jobs.c.state == state.value)
    if cursor is not None:
        created_at, job_id = _parse_cursor(cursor)
        older = jobs.c.created_at < created_at
        query = query.where(older | ((jobs.c.created_at == created_at) & (jobs.c.id < job_id)))
    with database.read() as connection:
        rows = connection.execute(query).all()
    page = [_summary_of(row) for row in rows[:limit]]
    return page, (_cursor_after(page[-1]) if len(rows) > limit else None)


def select_row(connection: sa.Connection, job_id: str, *, lock: bool = False) -> sa.Row[Any]:
    """Return the row of a job for `job_from_row`, which then parses it after the transaction.

    Raises:
        JobNotFoundError: there is none with this id.
    """
    query = sa.select(jobs).where(jobs.c.id == job_id)
    row = connection.execute(query.with_for_update() if lock else query).one_or_none()
    if row is None:
        raise JobNotFoundError(job_id)
    return row


def job_from_row(row: sa.Row[Any]) -> Job:
    """Return the job in a row that holds every column of the table.

    It validates documents of any size, so call it after the transaction that read the row.
    """
    problems: list[str] = []

    def parse(model: type[Model], name: str) -> Model | None:
        document = getattr(row, name)
        try:
            return None if document is None else model.model_validate(document)
        except ValidationError as error:
            problems.append(describe_unreadable(name, error))
            return None

    return Job(
        id=row.id,
        state=JobState(row.state),
        request=parse(ExplorationRequest, "request"),
        model_name=row.model_name,
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        attempt=row.attempt,
        owner=row.owner,
        lease_expires_at=row.lease_expires_at,
        cancel_requested=row.cancel_requested,
        report=parse(DeviceReport, "report"),
        space=row.space,
        recommendation=parse(Recommendation, "recommendation"),
        answer=parse(Answer, "answer"),
        error=row.error,
        waiting_reason=row.waiting_reason,
        last_seq=row.last_seq,
        version=row.version,
        unreadable=problems[0] if problems else None,
    )


def describe_unreadable(name: str, error: ValidationError) -> str:
    """Return why a stored document cannot be read: its first field that breaks a rule, and the rule."""
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(str(part) for part in (name, *first["loc"]))
    return f"another version stored what this one cannot read: {field}: {rule_of(first)}"


def _summary_of(row: sa.Row[Any]) -> JobSummary:
    values = row._asdict()
    return JobSummary(**values | {"state": JobState(values["state"])})


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
