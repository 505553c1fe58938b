"""The client against a scripted transport: what it sends, what it makes of answers, how it survives a bad line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import httpx
import pytest

from bexp.client.client import Client
from bexp.client.errors import ProblemError, ServiceError
from bexp.explorer.records.event import EventCode
from tests.api.cli.samples import EVENTS, event, job_document, sse
from tests.contracts.samples import make_trial

Handler = Callable[[httpx.Request], httpx.Response]


def client_of(handler: Handler, token: str | None = None) -> Client:
    return Client("http://service", token, transport=httpx.MockTransport(handler), sleep=lambda seconds: None)


class Broken(httpx.SyncByteStream):
    """A body that is cut off."""

    def __init__(self, *parts: bytes) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[bytes]:
        yield from self.parts
        raise httpx.ReadError("cut")


def test_problem_names_every_field_and_rule() -> None:
    problem = {
        "title": "Unprocessable Content",
        "detail": "The request is not one that can be explored.",
        "errors": [{"field": "model.hidden_size", "message": "must be a multiple"}, {"message": "too large"}],
    }
    with client_of(lambda _: httpx.Response(422, json=problem)) as client, pytest.raises(ProblemError) as raised:
        client.submit({})
    assert raised.value.status == 422
    assert raised.value.lines() == [
        "The request is not one that can be explored.",
        "model.hidden_size: must be a multiple",
        "too large",
    ]


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (lambda _: httpx.Response(500, json={"title": "Internal Server Error"}), "failed with 500"),
        (lambda _: httpx.Response(502, text="<html>"), "failed with 502"),
        (lambda _: httpx.Response(200, text="<html>"), "did not answer with JSON"),
        (lambda _: httpx.Response(200, json=["?"]), "cannot be read"),
        (lambda _: httpx.Response(200, json={"id": "job1"}), "cannot be read"),
        (
            lambda _: httpx.Response(200, json={**job_document(), "id": "x/../../../../evil/pwn"}),
            "Exploration cannot be read: id",
        ),
    ],
)
def test_a_failing_service_is_a_service_error(handler: Handler, expected: str) -> None:
    with client_of(handler) as client, pytest.raises(ServiceError, match=expected):
        client.get("job1")


def test_a_password_in_the_url_is_not_shown() -> None:
    with (
        Client("http://me:secret@127.0.0.1:9?token=secret", timeout=2.0) as client,
        pytest.raises(ServiceError, match=r"no service answers at http://127\.0\.0\.1:9$"),
    ):
        client.get("job1")


def test_a_certificate_that_is_not_trusted_is_named_with_the_way_out() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed", request=request)

    with client_of(refuse) as client, pytest.raises(ServiceError, match=r"verify failed; .* SSL_CERT_FILE"):
        client.connection.check_alive()


@pytest.mark.parametrize("body", ["<p>Hello</p>", '{"status": "well"}'])
def test_what_is_no_service_of_this_kind_is_said(body: str) -> None:
    other = client_of(lambda _: httpx.Response(200, text=body))
    with other as client, pytest.raises(ServiceError, match="is not a bexp service"):
        client.connection.check_alive()


@pytest.mark.parametrize("url", ["localhost:8642", "", "http://[::1", "ftp://host"])
def test_a_url_that_is_none_is_a_service_error(url: str) -> None:
    with pytest.raises(ServiceError), Client(url) as client:
        client.get("job1")


@pytest.mark.parametrize("job_id", ["../tokens", "a/b", "", "a?b", "x" * 65])
def test_an_id_never_leaves_its_place_in_the_path(job_id: str) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise AssertionError(request.url)

    with client_of(handler) as client, pytest.raises(ProblemError, match="not the id of an exploration"):
        client.get(job_id)


def test_a_proxy_is_not_asked_for_this_machine(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with Client(service) as client:
        client.connection.check_alive()


def test_a_list_comes_from_all_its_pages() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert request.url.params["state"] == "queued"
        cursor = None if "cursor" in request.url.params else "c"
        return httpx.Response(200, json={"items": [job_document("queued", request=None)], "next_cursor": cursor})

    with client_of(handler) as client:
        assert [job.model for job in client.list(state="queued")] == ["tiny", "tiny"]


def test_all_trials_come_by_number_from_pages_in_the_order_of_storing() -> None:
    pages = {None: ([2, 0], "1"), "1": ([3, 1], None)}

    def handler(request: httpx.Request) -> httpx.Response:
        numbers, cursor = pages[request.url.params.get("cursor")]
        items = [make_trial(number).model_dump(mode="json") for number in numbers]
        return httpx.Response(200, json={"items": items, "next_cursor": cursor, "end_cursor": cursor or "3"})

    with client_of(handler) as client:
        assert [trial.number for trial in client.trials("job1")] == [0, 1, 2, 3]


def test_events_are_taken_up_where_the_connection_broke() -> None:
    asked: list[str | None] = []

    def handler(request: httpx.Request) -> httpx.Response:
        after = request.headers.get("Last-Event-ID")
        asked.append(after)
        match len(asked):
            case 1:  # cut in the middle of the third event
                return httpx.Response(200, stream=Broken(sse(*EVENTS[:3])[:-20]))
            case 2:
                return httpx.Response(503, json={"title": "Service Unavailable"})
            case 3:  # a server that repeats what was seen, then closes without an end
                return httpx.Response(200, content=sse(*EVENTS[1:4]))
            case _:
                return httpx.Response(200, content=sse(*EVENTS[int(after or 0) :]))

    with client_of(handler) as client:
        assert list(client.events("job1")) == list(EVENTS)
    assert asked == [None, "2", "2", "4"]


def test_events_wait_no_longer_than_they_may() -> None:
    waits: list[float] = []

    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    client = Client("http://service", transport=httpx.MockTransport(handler), sleep=waits.append)
    with client, pytest.raises(ServiceError, match="no service answers"):
        next(client.events("job1", patience_seconds=12.0))
    assert 12.0 <= sum(waits) < 18.0
    assert max(waits) <= 5.0


@pytest.mark.parametrize(
    ("told", "gives_up"),
    [("retry: 1000\n\n", True), (sse(EVENTS[0]).removeprefix(b": hello\n\n"), True), (": keep-alive\n\n", False)],
    ids=["nothing", "old", "idle"],
)
def test_events_are_waited_for_while_the_service_says_that_nothing_happens(told: str, gives_up: bool) -> None:
    """Each stream is cut after what it has `told`, as a proxy does."""
    waits: list[float] = []

    def handler(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=told if len(waits) < 200 else sse(*EVENTS[1:]))

    client = Client("http://service", transport=httpx.MockTransport(handler), sleep=waits.append)
    with client, pytest.raises(ServiceError, match="gave up") if gives_up else nullcontext():
        assert list(client.events("job1", after=1)) == list(EVENTS[1:])
    assert (sum(waits) < 70) == gives_up or len(waits) == 200


def test_a_service_that_never_answers_is_not_waited_for_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def handler(request: httpx.Request) -> httpx.Response:
        nonlocal now
        now += 45.0
        raise httpx.ReadTimeout("silence", request=request)

    monkeypatch.setattr("bexp.client.client.time", SimpleNamespace(monotonic=lambda: now))
    client = Client("http://service", transport=httpx.MockTransport(handler), sleep=lambda _: None)
    with client, pytest.raises(ServiceError, match="did not answer in time"):
        list(client.events("job1"))
    assert now == 90.0


def test_a_refused_stream_is_not_tried_again() -> None:
    asked: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(404, json={"title": "Not Found", "detail": "There is no exploration with this id."})

    with client_of(handler) as client, pytest.raises(ProblemError, match="no exploration"):
        list(client.events("job1"))
    assert len(asked) == 1


def test_a_stream_that_has_nothing_more_ends() -> None:
    asked: list[str | None] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers.get("Last-Event-ID"))
        return httpx.Response(204)

    with client_of(handler) as client:
        assert list(client.events("job1", after=7)) == []
    assert asked == ["7"]


def test_a_gap_in_the_events_is_noticed() -> None:
    gapped = sse(event(1, EventCode.QUEUED), event(3, EventCode.SUCCEEDED))
    with (
        client_of(lambda _: httpx.Response(200, content=gapped)) as client,
        pytest.raises(ServiceError, match="skipped events 2 to 2"),
    ):
        list(client.events("job1"))
