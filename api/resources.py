"""What the API answers with, as JSON."""

from __future__ import annotations

from dataclasses import fields
from datetime import datetime
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field

from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.event import Event
from bexp.explorer.records.recommendation import Answer, Recommendation
from bexp.explorer.records.run_report import RunReport
from bexp.explorer.records.trial import Trial
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.trainer_terms import formats_for, own_formats
from bexp.storage.jobs import Job, JobState, JobSummary
from bexp.storage.run_reports import StoredRunReport
from bexp.storage.workers import KnownWorker, WorkerState

NextCursor = Annotated[
    str | None, Field(description="Pass it as `cursor` to get the next page; null if there is none yet.")
]
NO_NUL = r"^[^\x00]*$"
"""The pattern of a parameter that is compared with stored text: PostgreSQL refuses NUL."""
SEARCH = r"^\s*([^\s\x00]+(\s+|$)){0,8}$"
"""Eight words at most: each of them reads an index of all explorations."""

_RESULTS = (
    *("device_name", "micro_batch_size", "performance", "tokens_per_second", "confidence"),
    *("report", "space", "recommendation", "answer"),
)
"""The fields of an exploration that its measurements fill."""


class Links(BaseModel):
    """The paths of an exploration's resources."""

    self: str
    events: str
    log: str
    recommendation: str
    trials: str
    run_reports: str
    cancel: str
    resume: str

    @classmethod
    def of(cls, job_id: str) -> Links:
        """Return the links of one exploration."""
        here = exploration_path(job_id)
        parts = {part: f"{here}/{part}" for part in ("events", "log", "recommendation", "trials", "cancel", "resume")}
        return cls(self=here, run_reports=f"{here}/run-reports", **parts)


class AnswerSource(BaseModel):
    """Where an answer comes from that was not measured for this exploration."""

    exploration: Annotated[str, Field(description="The exploration that measured it; it may have been deleted.")]
    measured_at: Annotated[datetime, Field(description="When that exploration finished.")]

    @classmethod
    def of(cls, job: JobSummary) -> Self | None:
        """Return where the answer of a job comes from; None if the job measured it."""
        if job.reused_from is None or job.measured_at is None:
            return None
        return cls(exploration=job.reused_from, measured_at=job.measured_at)


class ExplorationSummary(BaseModel):
    """An exploration in a list."""

    id: str
    state: JobState
    owner: Annotated[str, Field(description="The owner of the token that submitted it; `local` without a token.")]
    priority: Annotated[int, Field(description="Among the explorations of its owner, the highest is next.")]
    model: Annotated[str, Field(description="The model's name.")]
    labels: Annotated[dict[str, str], Field(description="Those of the request.")]
    device_name: Annotated[str | None, Field(description="Of the device that it runs on; null until one has it.")]
    micro_batch_size: Annotated[int | None, Field(description="The one recommended so far.")]
    performance: Annotated[float | None, Field(description="Its speed relative to the base.")]
    tokens_per_second: Annotated[float | None, Field(description="Those to expect of one device.")]
    confidence: int | None
    confidence_target: Annotated[
        int | None, Field(description="What the request asks for. An answer with less confidence is provisional.")
    ]
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    cancel_requested: bool
    waiting_reason: Annotated[str | None, Field(description="Why no live worker can run it, or why none does yet.")]
    error: str | None
    answered_from: Annotated[
        AnswerSource | None, Field(description="Null if the exploration measures, or has measured, its own answer.")
    ]
    links: Links

    @classmethod
    def of(cls, job: JobSummary) -> Self:
        """Return the resource of a summary."""
        return cls(**_summary_fields(job))


def _summary_fields(job: JobSummary) -> dict[str, Any]:
    return {
        "id": job.id,
        "state": job.state,
        "owner": job.owner,
        "priority": job.priority,
        "model": job.model_name,
        "labels": dict(job.labels),
        "device_name": job.device_name,
        "micro_batch_size": job.micro_batch_size,
        "performance": job.performance,
        "tokens_per_second": job.tokens_per_second,
        "confidence": job.confidence,
        "confidence_target": job.confidence_target,
        "created_at": job.created_at,
        "started_at": job.started_at,
        "finished_at": job.finished_at,
        "cancel_requested": job.cancel_requested,
        "waiting_reason": job.waiting_reason,
        "error": job.error,
        "answered_from": AnswerSource.of(job),
        "links": Links.of(job.id),
    }


class Exploration(ExplorationSummary):
    """An exploration: its request, its state, and its results."""

    request: Annotated[
        ExplorationRequest | None, Field(description="Null if another version stored it and this one cannot read it.")
    ]
    attempt: Annotated[int, Field(description="How many times a worker has started or resumed it.")]
    last_seq: Annotated[int, Field(description="The seq of its latest event.")]
    report: Annotated[
        DeviceReport | None, Field(description="The device that it runs on, and the back ends that are usable there.")
    ]
    space: Annotated[dict[str, Any] | None, Field(description="A summary of the legal space.")]
    recommendation: Recommendation | None
    answer: Answer | None
    export_formats: Annotated[
        list[str], Field(description="The formats of training frameworks that can hold the answer so far.")
    ]
    own_formats: Annotated[
        list[str], Field(description="Those of them that the request's trainer reads; all if it names none.")
    ]

    @classmethod
    def of_job(cls, job: Job, *, with_results: bool = True) -> Exploration:
        """Return the resource of a job; without its results for a caller that may not read them.

        Its parts are not validated again, because the rules of a request take longer than all else here.
        """
        names = ("request", "attempt", "last_seq", "report", "space", "recommendation", "answer")
        shown = _summary_fields(job) | {name: getattr(job, name) for name in names}
        shown["error"] = job.error or job.unreadable
        best = job.recommendation if with_results else None
        shown["export_formats"] = [] if best is None else formats_for(best, job.request)
        shown["own_formats"] = [] if best is None else own_formats(best, job.request)
        return cls.model_construct(**shown | ({} if with_results else dict.fromkeys(_RESULTS)))


class RecommendationResource(BaseModel):
    """The best known candidate; `final` says that it will not change any more.

    If nothing fits, a finished exploration has a null `recommendation`, and the variants of `answer` say why.
    """

    id: str
    state: JobState
    final: bool
    target: Annotated[str | None, Field(description="The code whose training step was measured.")]
    target_version: Annotated[
        str | None,
        Field(description="The version of the library whose code was measured; null for the reference layers."),
    ]
    target_class: Annotated[
        str | None,
        Field(description="The class whose training step was measured; null for the reference layers."),
    ]
    allocator: Annotated[str | None, Field(description="The setting of PyTorch's allocator that the answer is for.")]
    recommendation: Recommendation | None
    answer: Annotated[Answer | None, Field(description="With every variant and where the time went, once finished.")]
    hardware: Annotated[HardwareSpec | None, Field(description="What the figures were measured on.")] = None
    request: Annotated[ExplorationRequest | None, Field(description="What was asked; `bexp.apply` needs it.")] = None

    @classmethod
    def of(cls, job: Job) -> Self:
        """Return the recommendation of a job; the target and the allocator are None if its request cannot be read."""
        best = job.recommendation
        parts = job.report.parts if job.report else None
        return cls(
            id=job.id,
            state=job.state,
            final=job.state.is_final,
            target=job.request.target_name if job.request else None,
            target_version=parts.target_version if parts else None,
            target_class=parts.class_name if parts else None,
            allocator=job.request.allocator if job.request else None,
            hardware=job.report.hardware if job.report else None,
            request=job.request,
            recommendation=best,
            answer=job.answer,
        )


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


class WorkerResource(BaseModel):
    """A worker: what it measures with, and what it does."""

    id: str
    host: str
    state: Annotated[WorkerState, Field(description="`lost`: its heartbeat is overdue, and it did not shut down.")]
    exploration: Annotated[str | None, Field(description="The one that it measures, or had when it was lost.")]
    held_by: Annotated[str | None, Field(description="Of one that is `waiting`: who has its devices.")]
    devices: Annotated[str, Field(description="The devices that it owns; `cuda:0+3` is that one and three more.")]
    num_devices: int
    device_kind: str
    device_name: Annotated[str, Field(description="Empty until it has had the devices.")]
    memory_bytes: Annotated[int, Field(description="What `memory_limit_gib` may ask for of one device.")]
    fingerprint: Annotated[str, Field(description="Equal for workers whose measurements can be compared.")]
    versions: Annotated[dict[str, str], Field(description="Of the libraries that a measurement depends on.")]
    targets: Annotated[dict[str, str], Field(description="The version of each target that it can measure.")]
    reserved: Annotated[
        bool, Field(description="It takes one exploration alone, whose command has started it on its machine.")
    ]
    started_at: datetime
    last_heartbeat_at: datetime
    lost_since: datetime | None

    @classmethod
    def of(cls, worker: KnownWorker) -> Self:
        """Return the resource of a worker."""
        info = worker.info
        return cls(
            **{part.name: getattr(info, part.name) for part in fields(info) if part.name not in {"pid", "name"}},
            reserved=bool(info.name),
            state=worker.state,
            exploration=worker.job_id,
            started_at=worker.started_at,
            last_heartbeat_at=worker.last_seen_at,
            lost_since=worker.last_seen_at if worker.state is WorkerState.LOST else None,
        )


class WorkerList(BaseModel):
    """The workers that live, and those that were lost within a day."""

    items: list[WorkerResource]


class Health(BaseModel):
    """Whether the service is alive, or can do its work."""

    status: str


def exploration_path(job_id: str) -> str:
    """Return the path of an exploration."""
    return f"/v1/explorations/{job_id}"
