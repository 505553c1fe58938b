"""Explorations, wherever they are kept: the interface of a service's client and of a database, and what both return."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bexp.client.errors import ServiceError
from bexp.explorer.model.base import rule_of
from bexp.explorer.model.target import describe_target
from bexp.explorer.records.event import Event
from bexp.explorer.records.recommendation import Answer, Recommendation
from bexp.explorer.records.run_report import RunReport
from bexp.explorer.records.trial import Trial
from bexp.explorer.request.request import ExplorationRequest

M = TypeVar("M", bound=BaseModel)

State = Literal["queued", "running", "succeeded", "failed", "cancelled"]
FINAL_STATES: frozenset[State] = frozenset({"succeeded", "failed", "cancelled"})
NO_RECOMMENDATION, NOT_FINISHED = "no-recommendation", "not-finished"
"""Names of problems that mean something to a caller."""
NOTE_HEADER = "Bexp-Export-Note"
"""A header for each line that belongs to an export whose format has no comments."""


class AnswerOrigin(BaseModel):
    """The exploration that measured an answer, and when it finished."""

    model_config = ConfigDict(frozen=True)

    exploration: str
    measured_at: datetime


class Exploration(BaseModel):
    """An exploration. Fields that are not named here are kept.

    `micro_batch_size` is the one recommended so far, and `confidence` (0 to 99) the probability in percent that it is
    within the tolerance of the best.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
    state: State
    model: str
    labels: dict[str, str] = Field(default_factory=dict)
    micro_batch_size: int | None = None
    confidence: int | None = None
    cancel_requested: bool = False
    error: str | None = None
    waiting_reason: str | None = None
    device_name: str | None = Field(None, description="Of the device that it runs on; None until one has it.")
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    attempt: int = Field(0, description="Left out in lists.")
    request: ExplorationRequest | None = Field(None, description="Left out in lists.")
    answered_from: AnswerOrigin | None = Field(None, description="None if the exploration measures its own answer.")
    report: dict[str, Any] | None = Field(None, description="The device that it runs on. Left out in lists.")

    @property
    def is_final(self) -> bool:
        """Whether the exploration has ended."""
        return self.state in FINAL_STATES


class Result(BaseModel):
    """The result of an exploration; `final` says that it will not change any more.

    A finished exploration without a `recommendation` says why in the variants of its `answer`, which is None before
    the end and after a failure.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    state: State
    final: bool
    target: str | None = None
    target_version: str | None = None
    target_class: str | None = None
    allocator: str | None = None
    recommendation: Recommendation | None
    answer: Answer | None

    @property
    def measured(self) -> str | None:
        """What was measured, for a person; None if that is not known."""
        return describe_target(self.target, self.target_version, self.target_class) if self.target else None


class Worker(BaseModel):
    """A worker. Fields that are not named here are kept."""

    model_config = ConfigDict(frozen=True, extra="allow")

    id: str
    state: str
    exploration: str | None
    held_by: str | None = Field(None, description="Of one that is waiting: who has its devices.")
    host: str
    devices: str
    num_devices: int
    device_name: str
    versions: dict[str, str]
    targets: dict[str, str]
    reserved: bool = Field(False, description="It takes one exploration alone, whose command has started it.")
    last_heartbeat_at: datetime


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
    ) -> Iterator[Exploration]:
        """Yield explorations, the newest first; of those that have each of `labels`, `key=value`."""

    def cancel(self, job_id: str) -> Exploration:
        """Cancel an exploration; its worker stops within seconds."""

    def resume(self, job_id: str) -> Exploration:
        """Queue an exploration again that was cancelled or has failed; one that waits or runs stays as it is."""

    def delete(self, job_id: str) -> None:
        """Delete an exploration that has ended, and all that belongs to it."""

    def workers(self) -> tuple[Worker, ...]:
        """Return the workers that live, and those that were lost within a day."""

    def result(self, job_id: str) -> Result | None:
        """Return the best candidate so far and, at the end, the whole answer; None while nothing is known."""

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
