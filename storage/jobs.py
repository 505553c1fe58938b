"""Jobs as they are read; each is one exploration. All changes go through `bexp.storage.queue`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
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
    """What a list shows of a job. It is read from columns of its own, so no stored document is parsed for it.

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

    A part that another version of this program stored may break the rules of this version. It is then None, and
    `unreadable` names the first such part with the rule.

    `reused_from` is the exploration that measured the answer at `measured_at`; None if this one measured it.
    `software` is what all claims measured with; None if its versions changed between two of them.
    """

    attempt: int
    worker: str | None
    lease_expires_at: datetime | None
    software: str | None
    space: dict[str, Any] | None
    request: ExplorationRequest | None
    report: DeviceReport | None
    recommendation: Recommendation | None
    answer: Answer | None
    unreadable: str | None


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
    """Return why a stored document cannot be read: its first field that breaks a rule, and the rule."""
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
