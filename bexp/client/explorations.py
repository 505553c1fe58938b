"""Explorations, wherever they are kept: the interface of a service's client and of a database, and what both return."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bexp.client.address import exploration_path
from bexp.client.errors import ServiceError
from bexp.explorer.answers.rows import AnswerText
from bexp.explorer.model.amounts import RateUnit, is_in_tokens
from bexp.explorer.model.base import is_null, rule_of
from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.event import Event
from bexp.explorer.records.recommendation import Answer, Recommendation
from bexp.explorer.records.run_report import RunReport
from bexp.explorer.records.trial import Trial
from bexp.explorer.request.request import ExplorationRequest

M = TypeVar("M", bound=BaseModel)

WorkerState = Literal["idle", "waiting", "measuring", "lost"]
State = Literal["queued", "running", "succeeded", "failed", "cancelled"]
FINAL_STATES: frozenset[State] = frozenset({"succeeded", "failed", "cancelled"})
NO_RECOMMENDATION, NOT_FINISHED = "no-recommendation", "not-finished"
"""Names of problems that mean something to a caller."""
NOTE_HEADER = "Bexp-Export-Note"
"""A header for each line that belongs to an export whose format has no comments."""


class _Document(BaseModel):
    """What a service answers with, and what a command without a service makes of what is stored."""

    model_config = ConfigDict(frozen=True, json_schema_serialization_defaults_required=True)


class Links(_Document):
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
        parts = ("events", "log", "recommendation", "trials", "cancel", "resume")
        paths = {part: exploration_path(job_id, part) for part in parts}
        return cls(self=exploration_path(job_id), run_reports=exploration_path(job_id, "run-reports"), **paths)


class AnswerSource(_Document):
    """Where an answer comes from that was not measured for this exploration."""

    exploration: Annotated[str, Field(description="The exploration that measured it; it may have been deleted.")]
    measured_at: Annotated[datetime, Field(description="When that exploration finished.")]


class QueuePlace(_Document):
    """The place of a queued exploration in the order in which workers take them."""

    place: Annotated[int, Field(description="Counted from 1.")]
    num_queued: Annotated[int, Field(description="Queued explorations that the same kinds of devices can run.")]
    busy_until: Annotated[
        datetime | None,
        Field(
            description="When the first of the workers that would take it has used the time budget of its present "
            "exploration; it may end earlier. Null if one is free or none has any budget left."
        ),
    ]


class ExplorationSummary(_Document):
    """An exploration in a list."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
    state: State
    owner: Annotated[str, Field(description="The owner of the token that submitted it; `local` without a token.")]
    priority: Annotated[int, Field(description="Among the explorations of its owner, the highest is next.")]
    model: Annotated[str, Field(description="The model's name.")]
    labels: Annotated[dict[str, str], Field(description="Those of the request.")]
    device_name: Annotated[str | None, Field(description="Of the device that it runs on; null until one has it.")]
    micro_batch_size: Annotated[int | None, Field(description="The one recommended so far.")]
    performance: Annotated[float | None, Field(description="Its speed relative to the base.")]
    tokens_per_second: Annotated[float | None, Field(description="Those to expect of one device.")]
    rate_unit: Annotated[RateUnit, Field(description="What tokens_per_second counts.", exclude_if=is_in_tokens)] = (
        RateUnit.TOKENS
    )
    confidence: Annotated[
        int | None,
        Field(description="The probability in percent that it is within the tolerance of the best: 0 to 99."),
    ]
    confidence_target: Annotated[
        int | None, Field(description="What the request asks for. An answer with less confidence is provisional.")
    ]
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    cancel_requested: bool
    waiting_reason: Annotated[str | None, Field(description="Why no live worker can run it, or why none does yet.")]
    queue: Annotated[QueuePlace | None, Field(description="Null unless it is queued, and any worker may take it.")] = (
        None
    )
    error: str | None
    answered_from: Annotated[
        AnswerSource | None, Field(description="Null if the exploration measures, or has measured, its own answer.")
    ]
    links: Links

    @property
    def is_final(self) -> bool:
        """Whether the exploration has ended."""
        return self.state in FINAL_STATES


class Exploration(ExplorationSummary):
    """An exploration: its request, its state, and its results."""

    request: Annotated[
        ExplorationRequest | None, Field(description="Null if another version stored it and this one cannot read it.")
    ]
    attempt: Annotated[int, Field(description="How many times a worker has started or resumed it.")]
    last_seq: Annotated[int, Field(description="The seq of its latest event.")]
    notes: Annotated[str | None, Field(description="What people have written on it; null if nothing.")]
    report: Annotated[
        DeviceReport | None, Field(description="The device that it runs on, and the back ends that are usable there.")
    ]
    space: Annotated[dict[str, Any] | None, Field(description="A summary of the legal space.")]
    recommendation: Recommendation | None
    answer: Answer | None
    text: Annotated[AnswerText | None, Field(description="What is said of the answer; null while there is none.")]
    export_formats: Annotated[
        list[str], Field(description="The formats of training frameworks that can hold the answer so far.")
    ]
    own_formats: Annotated[
        list[str], Field(description="Those of them that the request's trainer reads; all if it names none.")
    ]


class Result(_Document):
    """The best known candidate; `final` says that it will not change any more.

    If nothing fits, a finished exploration has a null `recommendation`, and the variants of `answer` say why.
    """

    id: str
    state: State
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
    text: Annotated[AnswerText, Field(description="What is said of it.")]
    hardware: Annotated[HardwareSpec | None, Field(description="What the figures were measured on.")]
    request: Annotated[ExplorationRequest | None, Field(description="What was asked; `bexp.apply` needs it.")]

    @staticmethod
    def of(known: Exploration) -> Result | None:
        """Return the result of an exploration; None while there is neither a candidate nor an answer.

        The target and the allocator are None if the request cannot be read.
        """
        if known.text is None:
            return None
        request, report = known.request, known.report
        parts = None if report is None else report.parts
        return Result.model_construct(
            id=known.id,
            state=known.state,
            final=known.is_final,
            target=None if request is None else request.target_name,
            target_version=None if parts is None else parts.target_version,
            target_class=None if parts is None else parts.class_name,
            allocator=None if request is None else request.allocator,
            hardware=None if report is None else report.hardware,
            request=request,
            recommendation=known.recommendation,
            answer=known.answer,
            text=known.text,
        )


class GpuReading(_Document):
    """A GPU of a worker at its last heartbeat, as far as NVML says."""

    device: Annotated[str, Field(description="As the worker names it: `cuda:0`.")]
    busy_share: Annotated[
        float | None,
        Field(description="The share of the last second or less in which a kernel ran, 0 to 1.", exclude_if=is_null),
    ] = None
    temperature_celsius: Annotated[int | None, Field(exclude_if=is_null)] = None


class Worker(_Document):
    """A worker: what it measures with, and what it does."""

    id: str
    host: str
    state: Annotated[WorkerState, Field(description="`lost`: its heartbeat is overdue, and it did not shut down.")]
    exploration: Annotated[str | None, Field(description="The one that it measures, or had when it was lost.")]
    exploration_model: Annotated[str | None, Field(description="The name of that exploration's model.")]
    exploration_started_at: Annotated[
        datetime | None, Field(description="When that exploration was started, by whichever worker.")
    ]
    held_by: Annotated[str | None, Field(description="Of one that is `waiting`: who has its devices.")]
    devices: Annotated[str, Field(description="The devices that it owns; `cuda:0+3` is that one and three more.")]
    num_devices: int
    gpus: Annotated[
        tuple[GpuReading, ...] | None, Field(description="Absent where NVML says nothing.", exclude_if=is_null)
    ] = None
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


@dataclass(frozen=True, slots=True)
class Export:
    """A file for a training framework, and what belongs to it if its format has no comments."""

    text: str
    notes: tuple[str, ...]


class Explorations(Protocol):
    """Explorations that one place keeps: a service, or a database.

    Every method raises `ProblemError` if a request is refused, as for an unknown id, and `ServiceError` if the place
    cannot be reached or fails.
    """

    def submit(
        self, request: ExplorationRequest, /, *, idempotency_key: str | None = None, priority: int = 0
    ) -> Exploration:
        """Submit an exploration; among those of its owner, the highest `priority` is next."""

    def get(self, job_id: str) -> Exploration:
        """Return one exploration."""

    def list(
        self, *, state: State | None = None, model: str | None = None, labels: Sequence[str] = ()
    ) -> Iterator[ExplorationSummary]:
        """Yield explorations, the newest first; of those that have each of `labels`, `key=value`."""

    def cancel(self, job_id: str) -> Exploration:
        """Cancel an exploration; its worker stops within seconds."""

    def resume(self, job_id: str) -> Exploration:
        """Queue an exploration again that was cancelled or has failed; one that waits or runs stays as it is."""

    def delete(self, job_id: str) -> None:
        """Delete an exploration that has ended, and all that belongs to it."""

    def workers(self) -> tuple[Worker, ...]:
        """Return the workers that live, and those that were lost within a day."""

    def export(self, job_id: str, name: str) -> Export:
        """Return the answer as a file for a training framework, in the format called `name`."""

    def trials(self, job_id: str) -> tuple[Trial, ...]:
        """Return every trial that is stored so far, in the order of their numbers."""

    def run_reports(self, job_id: str) -> tuple[RunReport, ...]:
        """Return every report of a real run, in the order in which they arrived."""

    def events(self, job_id: str, *, after: int = 0) -> Iterator[Event]:
        """Follow the events of an exploration to its end, each exactly once and in order."""

    def stored_events(self, job_id: str) -> tuple[Event, ...]:
        """Return every event that is stored so far; unlike `events`, this does not wait for the end."""


def read_as(model: type[M], document: Any) -> M:
    """Return a document as `model`. Raises ServiceError if it cannot be read."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        reason = f"{'.'.join(str(part) for part in first['loc'])}: {rule_of(first)}"
        raise ServiceError(f"the service's {model.__name__} cannot be read: {reason}") from error
