"""The client of the REST API that the command line uses: `bexp.client`, with the service's own types."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bexp.client.connection import (
    EXPLORATIONS,
    JOB_ID,
    ConnectedClient,
    Connection,
    ProblemError,
    ServiceError,
    exploration_path,
)
from bexp.client.events import PATIENCE_SECONDS, follow_events
from bexp.client.headers import NOTE_HEADER
from bexp.explorer.records.event import Event
from bexp.explorer.records.recommendation import Answer, Recommendation
from bexp.explorer.records.run_report import RunReport
from bexp.explorer.records.trial import Trial
from bexp.explorer.spec.request import ExplorationRequest
from bexp.explorer.spec.rules import rule_of
from bexp.explorer.spec.target import describe_target

__all__ = ["Client", "Export", "Job", "JobPage", "JobState", "ProblemError", "Result", "ServiceError"]

M = TypeVar("M", bound=BaseModel)

JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]

FINAL_STATES: frozenset[JobState] = frozenset({"succeeded", "failed", "cancelled"})
NOT_FINISHED = "urn:bexp:problem:not-finished"
_JSON = {"Accept": "application/json"}


class AnswerSource(BaseModel):
    """The exploration that measured an answer, and when it finished."""

    model_config = ConfigDict(frozen=True)

    exploration: str
    measured_at: datetime


class Worker(BaseModel):
    """A worker as the service reports it. Fields that are not named here are kept."""

    model_config = ConfigDict(frozen=True, extra="allow")

    id: str
    state: str
    exploration: str | None
    host: str
    devices: str
    num_devices: int
    device_name: str
    versions: dict[str, str]
    targets: dict[str, str]
    last_heartbeat_at: datetime


class Job(BaseModel):
    """An exploration as the service reports it. Fields that are not named here are kept."""

    model_config = ConfigDict(frozen=True, extra="allow")

    id: Annotated[str, Field(pattern=f"^{JOB_ID.pattern}$")]
    state: JobState
    model: str
    labels: dict[str, str] = Field(default_factory=dict)
    micro_batch_size: int | None = None
    confidence: int | None = None
    error: str | None = None
    waiting_reason: str | None = None
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    attempt: int = Field(0, description="Left out in lists.")
    request: ExplorationRequest | None = Field(None, description="Left out in lists.")
    answered_from: AnswerSource | None = Field(None, description="Null if the exploration measures its own answer.")
    report: dict[str, Any] | None = Field(None, description="The device that it runs on. Left out in lists.")

    @property
    def is_final(self) -> bool:
        """Whether the exploration has ended."""
        return self.state in FINAL_STATES


class Result(BaseModel):
    """The result of an exploration; `final` says that it will not change any more.

    A finished exploration without a `recommendation` says why in the variants of its `answer`, which is null before
    the end and after a failure.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    state: JobState
    final: bool
    target: str | None = None
    target_version: str | None = None
    target_class: str | None = None
    allocator: str | None = None
    recommendation: Recommendation | None
    answer: Answer | None

    @property
    def measured(self) -> str | None:
        """What was measured, for a person; null if the service did not say."""
        return describe_target(self.target, self.target_version, self.target_class) if self.target else None


@dataclass(frozen=True, slots=True)
class Export:
    """A file for a training framework, and what belongs to it if its format has no comments."""

    text: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JobPage:
    """Some jobs, the newest first, and the cursor of the next page, if there is one."""

    jobs: tuple[Job, ...]
    next_cursor: str | None


class Client(ConnectedClient):
    """Talks to one service, as `Connection` does. Close it, or use it in a `with`."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        timeout: float = 30.0,
        *,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.connection = Connection(url, token, timeout, transport=transport)
        self._sleep = sleep
        self.url = self.connection.url

    def check_alive(self) -> None:
        """Raise ServiceError with the reason if no service of this kind answers at the URL."""
        self.connection.check_alive()

    def submit(
        self,
        request: ExplorationRequest | dict[str, Any],
        *,
        idempotency_key: str | None = None,
        priority: int = 0,
    ) -> Job:
        """Submit an exploration; among those of its owner, the highest `priority` is next."""
        body = request.model_dump(mode="json") if isinstance(request, ExplorationRequest) else request
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        params = {"priority": priority} if priority else {}
        document = self.connection.request("POST", EXPLORATIONS, json=body, headers=headers, params=params)
        return _parse(Job, document)

    def get(self, job_id: str) -> Job:
        """Return one exploration."""
        return _parse(Job, self.connection.request("GET", exploration_path(job_id)))

    def list(
        self,
        *,
        state: JobState | None = None,
        model: str | None = None,
        labels: Sequence[str] = (),
        limit: int | None = None,
        cursor: str | None = None,
    ) -> JobPage:
        """Return a page of explorations, of those that have each of `labels`, `key=value`."""
        asked = {"state": state, "model": model, "label": [*labels] or None, "limit": limit, "cursor": cursor}
        params = {key: value for key, value in asked.items() if value is not None}
        page = self.connection.page(EXPLORATIONS, params=params)
        return JobPage(tuple(_parse(Job, item) for item in page["items"]), page.get("next_cursor"))

    def cancel(self, job_id: str) -> Job:
        """Cancel an exploration; its worker stops within seconds."""
        return _parse(Job, self.connection.request("POST", exploration_path(job_id, "cancel")))

    def resume(self, job_id: str) -> Job:
        """Queue an exploration again that was cancelled or has failed; one that waits or runs stays as it is."""
        return _parse(Job, self.connection.request("POST", exploration_path(job_id, "resume")))

    def delete(self, job_id: str) -> None:
        """Delete an exploration that has ended, and all that belongs to it."""
        self.connection.send("DELETE", exploration_path(job_id))

    def workers(self) -> tuple[Worker, ...]:
        """Return the workers that live, and those that were lost within a day."""
        page = self.connection.page("/v1/workers")
        return tuple(_parse(Worker, item) for item in page["items"])

    def recommendation(self, job_id: str) -> Result | None:
        """Return the best candidate so far and, at the end, the whole answer; null while nothing is known."""
        document = self.connection.recommendation(job_id)
        return None if document is None else _parse(Result, document)

    def export(self, job_id: str, name: str) -> Export:
        """Return the answer as a file for a training framework, in the format called `name`."""
        path = exploration_path(job_id, "recommendation")
        response = self.connection.send("GET", path, params={"format": name})
        return Export(response.text, tuple(response.headers.get_list(NOTE_HEADER)))

    def trials(self, job_id: str) -> tuple[Trial, ...]:
        """Return every trial that is stored so far, in the order of their numbers."""
        items = self.connection.pages(exploration_path(job_id, "trials"))
        return tuple(sorted((_parse(Trial, item) for item in items), key=lambda trial: trial.number))

    def report_run(self, job_id: str, report: RunReport) -> None:
        """Send back what a real run of the recommendation reached."""
        path = exploration_path(job_id, "run-reports")
        self.connection.request("POST", path, json=report.model_dump(mode="json"))

    def run_reports(self, job_id: str) -> tuple[RunReport, ...]:
        """Return every report of a real run, in the order in which they arrived."""
        page = self.connection.page(exploration_path(job_id, "run-reports"), params={"limit": 1000})
        return tuple(_parse(RunReport, item.get("report")) for item in page["items"])

    def events(self, job_id: str, *, after: int = 0, patience_seconds: float = PATIENCE_SECONDS) -> Iterator[Event]:
        """Follow a job's events from `after` (exclusive) to its end, as `follow_events` does."""
        for document in follow_events(
            self.connection, job_id, after=after, patience_seconds=patience_seconds, sleep=self._sleep
        ):
            try:
                yield Event.model_validate(document)
            except ValidationError as error:
                raise ServiceError(f"the service sent an event that cannot be read: {_first(error)}") from error

    def stored_events(self, job_id: str) -> tuple[Event, ...]:
        """Return every event that is stored so far; unlike `events`, this does not wait for the end."""
        events: list[Event] = []
        while True:
            params = {"after": events[-1].seq if events else 0}
            page = self.connection.page(exploration_path(job_id, "events"), params=params, headers=_JSON)
            events += [_parse(Event, item) for item in page["items"]]
            if page.get("next_cursor") is None or not page["items"]:
                return tuple(events)


def _parse(model: type[M], document: Any) -> M:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise ServiceError(f"the service's {model.__name__} cannot be read: {_first(error)}") from error


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {rule_of(first)}"
