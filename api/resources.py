"""The resources of the API: what it answers with, as JSON."""

from __future__ import annotations

from dataclasses import fields
from datetime import datetime
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field

from bexp.client.explorations import AnswerSource, Exploration, ExplorationSummary, Links, QueuePlace, Worker
from bexp.explorer.answers.answer import Explored, answer_text
from bexp.explorer.model.amounts import RateUnit
from bexp.explorer.records.event import Event
from bexp.explorer.records.run_report import RunReport
from bexp.explorer.records.trial import Trial
from bexp.explorer.search.trainer_terms import formats_for, own_formats
from bexp.storage.audit import Action
from bexp.storage.jobs import Job, JobSummary
from bexp.storage.run_reports import StoredRunReport
from bexp.storage.waiting import QueuePlace as StoredPlace
from bexp.storage.workers import KnownWorker, WorkerState

NextCursor = Annotated[
    str | None, Field(description="Pass it as `cursor` to get the next page; null if there is none yet.")
]
NO_NUL = r"^[^\x00]*$"
"""The pattern of a parameter that is compared with stored text: PostgreSQL refuses NUL."""
NO_CONTROL = r"^[^\x00-\x08\x0b-\x1f\x7f-\x9f]*$"
"""The pattern of a text that terminals print: they act on control characters."""
SEARCH = r"^\s*([^\s\x00]+(\s+|$)){0,8}$"
"""Eight words at most: each of them reads an index of all explorations."""

_RESULTS = (
    *("device_name", "micro_batch_size", "performance", "tokens_per_second", "confidence"),
    *("notes", "report", "space", "recommendation", "answer", "text"),
)
"""The fields of an exploration that its measurements fill, and what people write of them."""


def summary_of(job: JobSummary, place: StoredPlace | None = None) -> ExplorationSummary:
    """Return an exploration as a list shows it, and its `place` in the queue."""
    return ExplorationSummary.model_construct(**_summary_fields(job, place))


def exploration_of(job: Job, *, with_results: bool = True, place: StoredPlace | None = None) -> Exploration:
    """Return an exploration and its `place` in the queue, without its results for a caller that may not read them.

    Its parts are not validated again, because the rules of a request take longer than all the rest.
    """
    names = ("request", "attempt", "last_seq", "notes", "report", "space", "recommendation", "answer")
    shown = _summary_fields(job, place) | {name: getattr(job, name) for name in names}
    shown["error"] = job.error or job.unreadable
    best = job.recommendation if with_results else None
    explored = Explored(job.id, job.request, job.report, is_over=job.state.is_final)
    shown["text"] = answer_text(explored, job.recommendation, job.answer) if with_results else None
    shown["export_formats"] = [] if best is None else formats_for(best, job.request)
    shown["own_formats"] = [] if best is None else own_formats(best, job.request)
    return Exploration.model_construct(**shown | ({} if with_results else dict.fromkeys(_RESULTS)))


def worker_of(worker: KnownWorker) -> Worker:
    """Return a worker."""
    info = worker.info
    return Worker(
        **{part.name: getattr(info, part.name) for part in fields(info) if part.name not in {"pid", "name"}},
        reserved=bool(info.name),
        state=worker.state.value,
        exploration=worker.job_id,
        exploration_model=worker.model_name,
        exploration_started_at=worker.job_started_at,
        started_at=worker.started_at,
        last_heartbeat_at=worker.last_seen_at,
        lost_since=worker.last_seen_at if worker.state is WorkerState.LOST else None,
    )


def _summary_fields(job: JobSummary, place: StoredPlace | None) -> dict[str, Any]:
    source = None
    if job.reused_from is not None and job.measured_at is not None:
        source = AnswerSource(exploration=job.reused_from, measured_at=job.measured_at)
    names = (
        *("id", "owner", "priority", "device_name", "micro_batch_size", "performance", "tokens_per_second"),
        *("confidence", "confidence_target", "created_at", "started_at", "finished_at", "cancel_requested"),
        "error",
    )
    return {name: getattr(job, name) for name in names} | {
        "state": job.state.value,
        "model": job.model_name,
        "labels": dict(job.labels),
        **_of_queue(job, place),
        "rate_unit": RateUnit(job.rate_unit or RateUnit.TOKENS),
        "answered_from": source,
        "links": Links.of(job.id),
    }


def _of_queue(job: JobSummary, place: StoredPlace | None) -> dict[str, Any]:
    if place is None:
        return {"queue": None, "waiting_reason": job.waiting_reason}
    queue = QueuePlace(place=place.place, num_queued=place.num_queued, busy_until=place.busy_until)
    reason = job.waiting_reason or place.reason  # nothing is noted of one that was just submitted
    return {"queue": queue, "waiting_reason": reason}


MAX_NOTES = 4000


class Notes(BaseModel):
    """Notes of people on an exploration."""

    model_config = ConfigDict(extra="forbid")

    text: Annotated[
        str,
        Field(
            max_length=MAX_NOTES,
            pattern=NO_CONTROL,
            description="They replace those before; an empty text removes them. Of control characters it has only tabs "
            "and line breaks.",
        ),
    ]


class RunReportResource(BaseModel):
    """A report of a real run, and when it arrived."""

    number: Annotated[int, Field(description="Counts the reports of an exploration from 1.")]
    received_at: datetime
    report: RunReport

    @classmethod
    def of(cls, stored: StoredRunReport) -> Self:
        """Return the resource of a stored report."""
        return cls(number=stored.seq, received_at=stored.received_at, report=stored.report)


class RunReportPage(BaseModel):
    """Reports of real runs in the order in which they arrived."""

    items: list[RunReportResource]
    next_cursor: NextCursor


class ExplorationPage(BaseModel):
    """Explorations, the newest first."""

    items: list[ExplorationSummary]
    next_cursor: NextCursor


class EventPage(BaseModel):
    """Events in the order of their seq."""

    items: list[Event]
    next_cursor: NextCursor


class TrialPage(BaseModel):
    """Trials in the order of storing, which need not be that of their numbers."""

    items: list[Trial]
    next_cursor: NextCursor
    end_cursor: Annotated[str, Field(description="Pass it as `cursor` later to get what has been stored since.")]


class WorkerList(BaseModel):
    """The workers that live, and those that were lost within a day."""

    items: list[Worker]


class Health(BaseModel):
    """The state of the service."""

    status: str


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
