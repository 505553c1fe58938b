"""The client of a service, over HTTP: it submits configurations and returns recommendations that `bexp.apply` takes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import httpx

from bexp.client.address import EXPLORATIONS, exploration_path
from bexp.client.configuration import Configuration, read_configuration
from bexp.client.errors import ProblemError, ServiceError
from bexp.client.explorations import (
    NO_RECOMMENDATION,
    NOTE_HEADER,
    Exploration,
    ExplorationSummary,
    Export,
    State,
    Worker,
    read_as,
)
from bexp.explorer.records.event import Event, EventCode
from bexp.explorer.records.run_report import RunReport
from bexp.explorer.records.trial import Trial
from bexp.explorer.request.request import ExplorationRequest

if TYPE_CHECKING:
    from bexp.trainer.recommended_setup import RecommendedSetup
from contextlib import contextmanager

from bexp.client.address import is_loopback, without_secrets

SILENCE_SECONDS = 45.0  # the server sends comments more often than this while nothing happens
PATIENCE_SECONDS = 60.0


def follow_events(
    connection: Connection,
    job_id: str,
    *,
    after: int = 0,
    patience_seconds: float = PATIENCE_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[dict[str, Any]]:
    """Follow the events of an exploration from `after` (exclusive) to its end.

    After a dropped connection it continues where the connection broke. It yields nothing if `after` is the last event
    of an exploration that has ended. Raises ServiceError if the service sends neither an event nor a keep-alive for
    `patience_seconds`, or if an event cannot be read.

    An exploration that was cancelled and resumed has events after the one that ended it first.
    """
    seq, waited, delay, has_ended = after, 0.0, 0.2, False
    since = time.monotonic()

    def hear() -> None:
        nonlocal waited, delay, since
        waited, delay, since = 0.0, 0.2, time.monotonic()

    while True:
        reason: str
        since = time.monotonic()
        try:
            for event in _connect(connection, job_id, seq, hear):
                if event["seq"] <= seq:
                    continue
                if event["seq"] > seq + 1:
                    raise ServiceError(f"the service skipped events {seq + 1} to {event['seq'] - 1}")
                seq = event["seq"]
                has_ended = event["code"] >= EventCode.SUCCEEDED
                yield event
                hear()  # what the caller does with the event is no silence
            if has_ended:
                return
            reason = "the service closed the event stream"
        except _CompleteError:
            return
        except httpx.HTTPError as error:
            reason = connection.reason(error)
        except _RestartingError as error:
            reason = str(error)
        waited += time.monotonic() - since
        if waited >= patience_seconds:
            raise ServiceError(f"{reason} (gave up after {patience_seconds:.0f} s)")
        sleep(delay)
        waited, delay = waited + delay, min(5.0, 2 * delay)


class _RestartingError(Exception):
    """Raised when the service, or a proxy before it, asks the client to come back later."""


class _CompleteError(Exception):
    """Raised when the job has ended and all of its events were seen."""


def _connect(connection: Connection, job_id: str, after: int, hear: Callable[[], None]) -> Iterator[dict[str, Any]]:
    headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": str(after)} if after else {})
    with connection.stream(exploration_path(job_id, "events"), headers, SILENCE_SECONDS) as response:
        if response.status_code in {429, 502, 503, 504}:
            raise _RestartingError(f"the service answered {response.status_code}")
        if response.status_code >= httpx.codes.BAD_REQUEST:
            raise_for_stream(response)
        if response.status_code == httpx.codes.NO_CONTENT:  # do not connect again (WHATWG HTML, 9.2)
            raise _CompleteError
        for data in _sse_data(response.iter_lines(), hear):
            yield _read(data)


def _read(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
        if isinstance(event["seq"], int) and isinstance(event["code"], int):
            return dict(event)
    except (ValueError, TypeError, KeyError):
        pass
    raise ServiceError(f"the service sent an event that cannot be read: {data[:100]}")


def _sse_data(lines: Iterator[str], hear: Callable[[], None]) -> Iterator[str]:
    """Yield the data of each server-sent event (WHATWG HTML, 9.2), and call `hear` at each comment, a keep-alive.

    An incomplete last event is dropped.
    """
    data: list[str] = []
    for line in lines:
        if not line:
            if data:
                yield "\n".join(data)
            data = []
        elif line.startswith(":"):
            hear()
        elif line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))


DEFAULT_URL = "http://127.0.0.1:8642"


class Client:
    """The explorations of one service, see `bexp.client.explorations.Explorations`. Close it, or use it in a `with`.

    `url` and `token` are those of BEXP_API_URL and BEXP_API_TOKEN if they are not given; an empty `token` sends none.
    `timeout` is in seconds, for one request.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        timeout: float = 30.0,
        *,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        address = url or os.environ.get("BEXP_API_URL") or DEFAULT_URL
        sent = os.environ.get("BEXP_API_TOKEN") if token is None else token
        self.connection = Connection(address, sent, timeout, transport=transport)
        self._sleep = sleep

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self.connection.close()

    def submit(
        self,
        config: Configuration | ExplorationRequest,
        *,
        idempotency_key: str | None = None,
        priority: int = 0,
        **fields: Any,
    ) -> Exploration:
        """Submit a configuration, with `fields` of the request in place of its own.

        `config` is what `read_configuration` takes: a path, text, or an object. Among the explorations of its owner,
        the one with the highest `priority` is next.
        """
        given = config.model_dump(mode="json") if isinstance(config, ExplorationRequest) else config
        body = read_configuration(given, **fields)
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        params = {"priority": priority} if priority else {}
        document = self.connection.request("POST", EXPLORATIONS, json=body, headers=headers, params=params)
        return read_as(Exploration, document)

    def get(self, job_id: str) -> Exploration:
        """Return one exploration."""
        return read_as(Exploration, self.connection.request("GET", exploration_path(job_id)))

    def list(
        self, *, state: State | None = None, model: str | None = None, labels: Sequence[str] = ()
    ) -> Iterator[ExplorationSummary]:
        """Yield explorations, the newest first; of those that have each of `labels`, `key=value`."""
        asked = {"state": state, "model": model, "label": [*labels] or None}
        params = {key: value for key, value in asked.items() if value is not None}
        return (read_as(ExplorationSummary, item) for item in self.connection.pages(EXPLORATIONS, **params))

    def cancel(self, job_id: str) -> Exploration:
        """Cancel an exploration; its worker stops within seconds."""
        return read_as(Exploration, self.connection.request("POST", exploration_path(job_id, "cancel")))

    def resume(self, job_id: str) -> Exploration:
        """Queue an exploration again that was cancelled or has failed; nothing that is stored is measured again."""
        return read_as(Exploration, self.connection.request("POST", exploration_path(job_id, "resume")))

    def delete(self, job_id: str) -> None:
        """Delete an exploration that has ended, and all that belongs to it."""
        self.connection.send("DELETE", exploration_path(job_id))

    def workers(self) -> tuple[Worker, ...]:
        """Return the workers that live, and those that were lost within a day."""
        return tuple(read_as(Worker, item) for item in self.connection.page("/v1/workers")["items"])

    def answer(self, job_id: str) -> Mapping[str, Any] | None:
        """Return the recommendation as the service's document, to save as best.json; None while nothing is known."""
        try:
            stored = self.connection.request("GET", exploration_path(job_id, "recommendation"))
        except ProblemError as error:
            if error.name == NO_RECOMMENDATION:
                return None
            raise
        return stored if stored.get("recommendation") is not None else None

    def recommendation(self, job_id: str) -> RecommendedSetup | None:
        """Return the best candidate so far, as `bexp.apply` takes it; None while nothing is known."""
        from bexp.trainer.recommended_setup import RecommendedSetup  # noqa: PLC0415 - for those who ask for it

        document = self.answer(job_id)
        return None if document is None else RecommendedSetup.read(document)

    def export(self, job_id: str, name: str) -> Export:
        """Return the answer as a file for a training framework; docs/exports.md lists the names."""
        path = exploration_path(job_id, "recommendation")
        response = self.connection.send("GET", path, params={"format": name})
        return Export(response.text, tuple(response.headers.get_list(NOTE_HEADER)))

    def trials(self, job_id: str) -> tuple[Trial, ...]:
        """Return every trial that is stored so far, in the order of their numbers."""
        items = self.connection.pages(exploration_path(job_id, "trials"))
        return tuple(sorted((read_as(Trial, item) for item in items), key=lambda trial: trial.number))

    def report_run(self, job_id: str, report: RunReport) -> None:
        """Send back what a real run of the recommendation reached."""
        path = exploration_path(job_id, "run-reports")
        self.connection.request("POST", path, json=report.model_dump(mode="json"))

    def run_reports(self, job_id: str) -> tuple[RunReport, ...]:
        """Return every report of a real run, in the order in which they arrived."""
        items = self.connection.pages(exploration_path(job_id, "run-reports"), limit=1000)
        return tuple(read_as(RunReport, item.get("report")) for item in items)

    def events(self, job_id: str, *, after: int = 0, patience_seconds: float = PATIENCE_SECONDS) -> Iterator[Event]:
        """Follow the events of an exploration to its end, each exactly once and in order.

        Raises ServiceError if the service sends nothing for `patience_seconds`.
        """
        documents = follow_events(
            self.connection, job_id, after=after, patience_seconds=patience_seconds, sleep=self._sleep
        )
        return (read_as(Event, document) for document in documents)

    def stored_events(self, job_id: str) -> tuple[Event, ...]:
        """Return every event that is stored so far; unlike `events`, this does not wait for the end."""
        events: list[Event] = []
        while True:
            params = {"after": events[-1].seq if events else 0}
            path = exploration_path(job_id, "events")
            page = self.connection.page(path, params=params, headers={"Accept": "application/json"})
            events += [read_as(Event, item) for item in page["items"]]
            if page.get("next_cursor") is None or not page["items"]:
                return tuple(events)

    def wait(self, job_id: str) -> Exploration:
        """Wait for the end of an exploration, and return it."""
        for _ in self.events(job_id):
            pass
        return self.get(job_id)


class Connection:
    """Sends requests to one service. `timeout` is in seconds, for one request.

    Every method raises `ProblemError` if the service refuses the request (4xx), and `ServiceError` if it cannot be
    reached or fails.
    """

    def __init__(
        self, url: str, token: str | None = None, timeout: float = 30.0, *, transport: httpx.BaseTransport | None = None
    ) -> None:
        address_of_service = url.rstrip("/")
        self.url = without_secrets(address_of_service)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            address = httpx.URL(address_of_service)
            if address.scheme not in {"http", "https"}:
                raise ValueError("it must start with http:// or https://")  # noqa: TRY301 - one message for both
            beyond = not is_loopback(address.host)  # no proxy stands between this machine and itself
            self._http = httpx.Client(
                base_url=address_of_service,
                headers=headers,
                timeout=timeout,
                transport=transport,
                trust_env=beyond,
                # The context reads SSL_CERT_FILE and a file of all authorities. That takes long, and http needs none.
                verify=httpx.create_ssl_context() if address.scheme == "https" else False,
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise ServiceError(f"{self.url!r} is not a URL of a service: {error}") from error

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def check_alive(self) -> None:
        """Raise ServiceError with the reason if no service of this kind answers at the URL."""
        try:
            alive = self._http.get("/healthz", timeout=2.0).json() == {"status": "alive"}
        except httpx.HTTPError as error:
            raise ServiceError(self.reason(error)) from error
        except ValueError:
            alive = False
        if not alive:
            raise ServiceError(f"what answers at {self.url} is not a bexp service")

    def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request and return the response."""
        try:
            response = self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise ServiceError(self.reason(error)) from error
        _raise_for(response)
        return response

    def request(self, method: str, path: str, **options: Any) -> Any:
        """Send a request and return the JSON of the response."""
        response = self.send(method, path, **options)
        try:
            return response.json()
        except ValueError as error:
            raise ServiceError(f"{self.url}{path} did not answer with JSON: is this a bexp service?") from error

    def page(self, path: str, **options: Any) -> dict[str, Any]:
        """Return a page of a list, which has `items`."""
        document = self.request("GET", path, **options)
        if not isinstance(document, dict) or not isinstance(document.get("items"), list):
            raise ServiceError(f"{self.url} did not answer with a list: is this a bexp service?")
        return document

    def pages(self, path: str, **params: Any) -> Iterator[Any]:
        """Yield the items of all pages of a list."""
        while True:
            page = self.page(path, params=params)
            yield from page["items"]
            cursor = page.get("next_cursor")
            if cursor is None or cursor == params.get("cursor"):
                return
            params["cursor"] = cursor

    @contextmanager
    def stream(self, path: str, headers: dict[str, str], silence_seconds: float) -> Iterator[httpx.Response]:
        """Open a stream that ends if nothing comes for `silence_seconds`.

        Raises httpx.HTTPError if the connection breaks, and nothing for a status that is an error.
        """
        timeout = httpx.Timeout(self._http.timeout.connect, read=silence_seconds)
        with self._http.stream("GET", path, headers=headers, timeout=timeout) as response:
            yield response

    def reason(self, error: httpx.HTTPError) -> str:
        """Return what is wrong with a connection."""
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return f"{self.url}: {error}; if an authority of your own has signed it, name its file in SSL_CERT_FILE"
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return f"no service answers at {self.url}"
        if isinstance(error, httpx.TimeoutException):
            return f"the service at {self.url} did not answer in time"
        return f"the connection to {self.url} broke: {error or type(error).__name__}"


def raise_for_stream(response: httpx.Response) -> None:
    """Raise what the status of an opened stream means."""
    response.read()
    _raise_for(response)


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
