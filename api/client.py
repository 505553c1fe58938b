"""A Python client of the REST API, for the command line and for other programs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Annotated, Any, Literal, Self, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from api.settings import is_loopback, without_secrets
from explorer.records.event import Event
from explorer.records.recommendation import Answer, Recommendation
from explorer.records.run_report import RunReport
from explorer.records.trial import Trial
from explorer.spec.request import ExplorationRequest
from explorer.spec.target import describe_target

M = TypeVar("M", bound=BaseModel)

JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]

FINAL_STATES: frozenset[JobState] = frozenset({"succeeded", "failed", "cancelled"})
JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""What an id may be. A service is not trusted with more: the id becomes a part of a path, here and there."""

NO_RECOMMENDATION = "urn:bexp:problem:no-recommendation"
NOTE_HEADER = "Bexp-Export-Note"
"""A header for each line that belongs to an export whose format has no comments."""
_JSON = {"Accept": "application/json"}
SILENCE_SECONDS = 45.0  # the server sends comments more often than this while nothing happens


class ServiceError(Exception):
    """The service cannot be reached, it failed, or its answer cannot be understood."""


class ProblemError(Exception):
    """The service refused a request.

    `problem` is its RFC 9457 document, `status` the HTTP status.
    """

    def __init__(self, status: int, problem: dict[str, Any]) -> None:
        self.status = status
        self.problem = problem
        super().__init__(str(problem.get("detail") or problem.get("title") or f"HTTP {status}"))

    def lines(self) -> list[str]:
        """Return lines for a person: what is wrong, then each field with the rule that it breaks."""
        errors = self.problem.get("errors")
        listed = [_error_line(e) for e in errors if isinstance(e, dict)] if isinstance(errors, list) else []
        return [str(self), *listed]


class Job(BaseModel):
    """An exploration as the service reports it. Fields that are not named here are kept."""

    model_config = ConfigDict(frozen=True, extra="allow")

    id: Annotated[str, Field(pattern=f"^{JOB_ID.pattern}$")]
    state: JobState
    model: str
    micro_batch_size: int | None = None
    confidence: int | None = None
    error: str | None = None
    waiting_reason: str | None = None
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    attempt: int = Field(0, description="Left out in lists.")
    request: ExplorationRequest | None = Field(None, description="Left out in lists.")
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


class Client:
    """Talks to one service.

    Every method raises `ProblemError` if the service refuses the request (4xx), and `ServiceError` if it cannot be
    reached or fails. `timeout` is in seconds, for one request. The client holds connections: close it, or use it in a
    `with`.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        timeout: float = 30.0,
        *,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        address_of_service = url.rstrip("/")
        self.url = without_secrets(address_of_service)
        self._sleep = sleep
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            address = httpx.URL(address_of_service)
            if address.scheme not in {"http", "https"}:
                raise ValueError("it must start with http:// or https://")  # noqa: TRY301 - one message for both
            beyond = not is_loopback(address.host)  # no proxy stands between this machine and itself
            self._http = httpx.Client(
                base_url=address_of_service, headers=headers, timeout=timeout, transport=transport, trust_env=beyond
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise ServiceError(f"{self.url!r} is not a URL of a service: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def is_alive(self) -> bool:
        """Return whether a service of this kind answers at the URL."""
        try:
            return bool(self._http.get("/healthz", timeout=2.0).json() == {"status": "alive"})
        except (httpx.HTTPError, ValueError):
            return False

    def submit(self, request: ExplorationRequest | dict[str, Any], *, idempotency_key: str | None = None) -> Job:
        """Submit an exploration."""
        body = request.model_dump(mode="json") if isinstance(request, ExplorationRequest) else request
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        return self._parse(Job, self._request("POST", "/v1/explorations", json=body, headers=headers))

    def get(self, job_id: str) -> Job:
        """Return one exploration."""
        return self._parse(Job, self._request("GET", _path(job_id)))

    def list(self, *, state: JobState | None = None, limit: int | None = None, cursor: str | None = None) -> JobPage:
        """Return a page of explorations."""
        asked = {"state": state, "limit": limit, "cursor": cursor}
        params = {key: value for key, value in asked.items() if value is not None}
        page = self._page(self._request("GET", "/v1/explorations", params=params))
        return JobPage(tuple(self._parse(Job, item) for item in page["items"]), page.get("next_cursor"))

    def cancel(self, job_id: str) -> Job:
        """Cancel an exploration; its worker stops within seconds."""
        return self._parse(Job, self._request("POST", _path(job_id, "cancel")))

    def resume(self, job_id: str) -> Job:
        """Queue an exploration again that was cancelled or has failed; one that waits or runs stays as it is."""
        return self._parse(Job, self._request("POST", _path(job_id, "resume")))

    def recommendation(self, job_id: str) -> Result | None:
        """Return the best candidate so far and, at the end, the whole answer; null while nothing is known."""
        try:
            document = self._request("GET", _path(job_id, "recommendation"))
        except ProblemError as error:
            if error.problem.get("type") == NO_RECOMMENDATION:
                return None
            raise
        return self._parse(Result, document)

    def export(self, job_id: str, name: str) -> Export:
        """Return the answer as a file for a training framework, in the format called `name`."""
        response = self._send("GET", _path(job_id, "recommendation"), params={"format": name})
        return Export(response.text, tuple(response.headers.get_list(NOTE_HEADER)))

    def trials(self, job_id: str) -> tuple[Trial, ...]:
        """Return every trial that is stored so far, in the order of their numbers."""
        trials: list[Trial] = []
        params: dict[str, Any] = {}
        while True:
            page = self._page(self._request("GET", _path(job_id, "trials"), params=params))
            trials += [self._parse(Trial, item) for item in page["items"]]
            cursor = page.get("next_cursor")
            if cursor is None or cursor == params.get("cursor"):
                return tuple(sorted(trials, key=lambda trial: trial.number))  # pages are in the order of storing
            params = {"cursor": cursor}

    def report_run(self, job_id: str, report: RunReport) -> None:
        """Send back what a real run of the recommendation reached."""
        self._request("POST", _path(job_id, "run-reports"), json=report.model_dump(mode="json"))

    def run_reports(self, job_id: str) -> tuple[RunReport, ...]:
        """Return every report of a real run, in the order in which they arrived."""
        params: dict[str, Any] = {"limit": 1000}
        page = self._page(self._request("GET", _path(job_id, "run-reports"), params=params))
        return tuple(self._parse(RunReport, item.get("report")) for item in page["items"])

    def events(self, job_id: str, *, after: int = 0, patience_seconds: float = 60.0) -> Iterator[Event]:
        """Follow a job's events from `after` (exclusive) to its end, each exactly once and in order.

        After a dropped connection it continues where the connection broke. It yields nothing if `after` is the last
        event of a job that has ended. Raises ServiceError if the service cannot be reached for `patience_seconds`.

        A job that was cancelled and resumed has events after the one that ended it first.
        """
        seq, waited, delay, has_ended = after, 0.0, 0.2, False
        while True:
            reason: str
            try:
                for event in self._stream(job_id, seq):
                    if event.seq <= seq:
                        continue
                    if event.seq > seq + 1:
                        raise ServiceError(f"the service skipped events {seq + 1} to {event.seq - 1}")
                    seq, waited, delay = event.seq, 0.0, 0.2
                    has_ended = event.code.ends_job
                    yield event
                if has_ended:
                    return
                reason = "the service closed the event stream"
            except _CompleteError:
                return
            except httpx.HTTPError as error:
                reason = _reason(error, self.url)
            except _RestartingError as error:
                reason = str(error)
            if waited >= patience_seconds:
                raise ServiceError(f"{reason} (gave up after {patience_seconds:.0f} s)")
            self._sleep(delay)
            waited, delay = waited + delay, min(5.0, 2 * delay)

    def stored_events(self, job_id: str) -> tuple[Event, ...]:
        """Return every event that is stored so far; unlike `events`, this does not wait for the end."""
        events: list[Event] = []
        while True:
            params = {"after": events[-1].seq if events else 0}
            page = self._page(self._request("GET", _path(job_id, "events"), params=params, headers=_JSON))
            events += [self._parse(Event, item) for item in page["items"]]
            if page.get("next_cursor") is None or not page["items"]:
                return tuple(events)

    def _stream(self, job_id: str, after: int) -> Iterator[Event]:
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": str(after)} if after else {})
        timeout = httpx.Timeout(self._http.timeout.connect, read=SILENCE_SECONDS)
        with self._http.stream("GET", _path(job_id, "events"), headers=headers, timeout=timeout) as response:
            if response.status_code >= httpx.codes.BAD_REQUEST:
                response.read()
                if response.status_code in {429, 502, 503, 504}:
                    raise _RestartingError(f"the service answered {response.status_code}")
                _raise_for(response)
            if response.status_code == httpx.codes.NO_CONTENT:  # do not connect again (WHATWG HTML, 9.2)
                raise _CompleteError
            for data in _sse_data(response.iter_lines()):
                try:
                    yield Event.model_validate_json(data)
                except ValidationError as error:
                    raise ServiceError(f"the service sent an event that cannot be read: {_first(error)}") from error

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise ServiceError(_reason(error, self.url)) from error
        _raise_for(response)
        return response

    def _request(self, method: str, path: str, **options: Any) -> Any:
        response = self._send(method, path, **options)
        try:
            return response.json()
        except ValueError as error:
            raise ServiceError(f"{self.url}{path} did not answer with JSON: is this a bexp service?") from error

    def _page(self, document: Any) -> dict[str, Any]:
        if not isinstance(document, dict) or not isinstance(document.get("items"), list):
            raise ServiceError(f"{self.url} did not answer with a list: is this a bexp service?")
        return document

    def _parse(self, model: type[M], document: Any) -> M:
        try:
            return model.model_validate(document)
        except ValidationError as error:
            raise ServiceError(f"the service's {model.__name__} cannot be read: {_first(error)}") from error


class _RestartingError(Exception):
    """Raised when the service, or a proxy before it, asks the client to come back later."""


class _CompleteError(Exception):
    """Raised when the job has ended and all of its events were seen."""


def _path(job_id: str, *rest: str) -> str:
    if not JOB_ID.fullmatch(job_id):
        raise ProblemError(404, {"title": "Not Found", "detail": f"{job_id!r} is not the id of an exploration"})
    return "/".join(("/v1/explorations", job_id, *rest))


def _raise_for(response: httpx.Response) -> None:
    if response.status_code < httpx.codes.BAD_REQUEST:
        return
    try:
        problem = response.json()
    except ValueError:
        problem = None
    if not isinstance(problem, dict):
        problem = {"title": response.reason_phrase or f"HTTP {response.status_code}"}
    if response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
        cause = problem.get("detail") or problem.get("title")
        raise ServiceError(f"the service failed with {response.status_code}: {cause}")
    raise ProblemError(response.status_code, problem)


def _sse_data(lines: Iterator[str]) -> Iterator[str]:
    """Yield the data of each server-sent event (WHATWG HTML, 9.2). An incomplete last event is dropped."""
    data: list[str] = []
    for line in lines:
        if not line:
            if data:
                yield "\n".join(data)
            data = []
        elif line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))


def _reason(error: httpx.HTTPError, url: str) -> str:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return f"no service answers at {url}"
    if isinstance(error, httpx.TimeoutException):
        return f"the service at {url} did not answer in time"
    return f"the connection to {url} broke: {error or type(error).__name__}"


def _error_line(error: dict[str, Any]) -> str:
    where, rule = error.get("field"), error.get("message") or "is wrong"
    return f"{where}: {rule}" if where else str(rule)


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
