from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from bexp.api.settings import ServiceSettings
from bexp.explorer.records.event import Event, EventCode, EventDraft, Progress, recommendation_event
from bexp.storage.database import Database
from bexp.storage.events import PAGE, read_events, read_last_seqs
from bexp.storage.jobs import Job, JobState, get_job
from bexp.storage.leases import Lease
from bexp.storage.queue import Queue
from tests.api.problems import assert_problem
from tests.api.serving import GRACE_SECONDS, Served
from tests.contracts.samples import make_progress, make_recommendation
from tests.waits import PATIENCE_SECONDS, wait_until

SSE = {"Accept": "text/event-stream"}
JSON = {"Accept": "application/json"}


@contextmanager
def follow(served: Served, path: str, **headers: str) -> Iterator[tuple[httpx.Response, Iterator[str]]]:
    url = f"{served.url}/v1/explorations/{path}"
    with httpx.stream("GET", url, headers=headers, timeout=PATIENCE_SECONDS) as response:
        yield response, response.iter_lines()


def read_frames(lines: Iterator[str], number: int | None = None) -> list[dict[str, Any]]:
    """Events of a stream, parsed as the HTML standard says: all, or the first `number`."""
    frames: list[dict[str, Any]] = []
    frame: dict[str, Any] = {}
    while number is None or len(frames) < number:
        line = next(lines, None)
        if line is None:
            break
        if line == "":
            if "data" in frame:
                frames.append(frame)
            frame = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(": ")
            assert name not in frame
            frame[name] = value
    return frames


def test_events_arrive_as_they_happen_and_end_with_the_exploration(
    serve: Callable[[ServiceSettings], Served], settings: ServiceSettings, queue: Queue, lease: Lease
) -> None:
    served = serve(replace(settings, keep_alive_seconds=1000))  # nothing but the event itself wakes the stream
    with follow(served, f"{lease.job_id}/events", **SSE) as (response, lines):
        assert response.status_code == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["Cache-Control"] == "no-store"
        before = read_frames(lines, 2)
        for number in range(3):
            queue.record(lease, make_progress(number))
            (frame,) = read_frames(lines, 1)  # the next is not recorded before this one has come
            assert frame["event"] == "trial"
            assert json.loads(frame["data"])["data"] == {"number": number}
            before.append(frame)
        queue.finish(lease, JobState.SUCCEEDED)
        frames = before + read_frames(lines)
    events = [Event.model_validate_json(frame["data"]) for frame in frames]
    assert [frame["id"] for frame in frames] == [str(event.seq) for event in events] == ["1", "2", "3", "4", "5", "6"]
    assert [frame["event"] for frame in frames] == [event.code.name.lower() for event in events]
    assert events[0].code is EventCode.QUEUED
    assert events[-1].code is EventCode.SUCCEEDED


@pytest.mark.parametrize("way", ["header", "query", "both"])
def test_a_stream_resumes_without_loss_or_doubling(served: Served, queue: Queue, lease: Lease, way: str) -> None:
    queue.record(lease, make_progress(0))
    with follow(served, f"{lease.job_id}/events", **SSE) as (_, lines):
        last = read_frames(lines, 2)[-1]["id"]
    queue.record(lease, make_progress(1))
    queue.finish(lease, JobState.SUCCEEDED)
    headers = SSE if way == "query" else SSE | {"Last-Event-ID": last}
    query = {"header": "", "query": f"?after={last}", "both": "?after=1"}[way]
    with follow(served, f"{lease.job_id}/events{query}", **headers) as (_, lines):
        assert [frame["id"] for frame in read_frames(lines)] == ["3", "4", "5"]


def test_a_finished_exploration_that_was_seen_to_its_end_has_no_content(client: TestClient, job: Job) -> None:
    client.post(f"/v1/explorations/{job.id}/cancel")
    path = f"/v1/explorations/{job.id}/events"
    assert client.get(path, headers=SSE | {"Last-Event-ID": "2"}).status_code == 204
    assert client.get(path, headers=SSE | {"Last-Event-ID": "1"}).text.count("data:") == 1
    assert client.get(path, headers=SSE | {"Last-Event-ID": str((1 << 31) - 1)}).status_code == 204


@pytest.mark.parametrize("last", ["x", "-1", "1.5", "9" * 30, "NaN", str(1 << 31), "0" * 5000, "0" * 20 + "9" * 30])
def test_an_odd_last_event_id_is_refused(client: TestClient, job: Job, last: str) -> None:
    response = client.get(f"/v1/explorations/{job.id}/events", headers=SSE | {"Last-Event-ID": last})
    assert_problem(response, 422)
    assert response.json()["errors"][0]["field"] == "Last-Event-ID"


def test_events_come_in_pages_of_json(client: TestClient, queue: Queue, lease: Lease) -> None:
    for number in range(3):
        queue.record(lease, make_progress(number))
    path = f"/v1/explorations/{lease.job_id}/events"
    first = client.get(path, params={"limit": 3}, headers=JSON).json()
    assert [event["seq"] for event in first["items"]] == [1, 2, 3]
    assert first["next_cursor"] == "3"
    rest = client.get(path, params={"after": first["next_cursor"]}, headers=JSON).json()
    assert [event["seq"] for event in rest["items"]] == [4, 5]
    assert rest["next_cursor"] is None
    assert [Event.model_validate(item) for item in rest["items"]][-1].data == {"number": 2}


def test_accept_decides_between_stream_and_page(client: TestClient, job: Job) -> None:
    client.post(f"/v1/explorations/{job.id}/cancel")
    path = f"/v1/explorations/{job.id}/events"
    for accept, media_type in [
        ("*/*", "text/event-stream"),
        ("application/json;q=0.9, text/event-stream;q=0.1", "application/json"),
        ("application/*", "application/json"),
        ("text/event-stream, application/json", "text/event-stream"),
        ("", "text/event-stream"),
        ("application/json;q=0.5, text/*;q=0.4", "application/json"),
        ("text/event-stream;q=0, */*;q=0.1", "application/json"),
        ("text/event-stream;q=x, application/json;q=0.01", "application/json"),
        ("application/json;q=7, */*", "text/event-stream"),  # no quality is above 1
        ("text/event-stream;q=-1, application/json;q=0.1", "application/json"),
        ("TEXT/Event-Stream;level=1; Q = 0.2 , application/json;q=0.3", "application/json"),
        ("application/json;charset=utf-8, text/*;q=0.9", "application/json"),
    ]:
        response = client.get(path, headers={"Accept": accept})
        assert response.headers["Content-Type"].partition(";")[0] == media_type, accept
        assert response.headers["Vary"] == "Accept"
    assert_problem(client.get(path, headers={"Accept": "text/html"}), 406)
    assert_problem(client.get(path, headers={"Accept": "application/json;q=0, text/event-stream;q=0"}), 406)


def test_the_log_is_lines(client: TestClient, queue: Queue, lease: Lease) -> None:
    queue.record(lease, Progress(events=(recommendation_event(make_recommendation()),)))
    queue.record(lease, Progress(events=(EventDraft(code=EventCode.WARNING, message="two\nlines"),)))
    response = client.get(f"/v1/explorations/{lease.job_id}/log")
    assert response.headers["Content-Type"] == "text/plain; charset=utf-8"
    lines = response.text.splitlines()
    assert re.fullmatch(
        r"BEXP202 \d\d:\d\d:\d\d GMT  Current recommended micro_batch_size: 2, estimated performance: 1\.20x base, "
        r"confidence score: 45 \(out of 100\)",
        lines[2],
    )
    assert lines[3].endswith("  two lines")
    assert len(lines) == 4


def test_the_followed_log_shows_each_line_at_once(served: Served, queue: Queue, lease: Lease) -> None:
    with follow(served, f"{lease.job_id}/log?follow=true") as (_, lines):
        assert next(lines).startswith("BEXP101 ")
        assert next(lines).startswith("BEXP102 ")
        queue.record(lease, make_progress(0))
        assert next(lines).endswith("  trial 0")
        queue.finish(lease, JobState.FAILED, error="broken")
        assert next(lines).endswith(": broken")
        assert list(lines) == []


def test_a_stream_goes_on_after_an_end_that_fills_its_page(client: TestClient, queue: Queue, lease: Lease) -> None:
    num_before = get_job(queue.database, lease.job_id).last_seq
    drafts = tuple(EventDraft(code=EventCode.WARNING, message=str(i)) for i in range(PAGE - 1 - num_before))
    queue.record(lease, Progress(events=drafts))
    queue.finish(lease, JobState.FAILED, error="oh")
    assert get_job(queue.database, lease.job_id).last_seq == PAGE
    path = f"/v1/explorations/{lease.job_id}/log?follow=true"
    assert client.get(path).text.count("\n") == PAGE
    queue.resume(lease.job_id)
    queue.request_cancel(lease.job_id)
    assert client.get(path).text.count("\n") == get_job(queue.database, lease.job_id).last_seq > PAGE


def test_an_idle_stream_is_kept_alive(
    serve: Callable[[ServiceSettings], Served], settings: ServiceSettings, job: Job
) -> None:
    served = serve(replace(settings, keep_alive_seconds=0.05))
    with follow(served, f"{job.id}/events", **SSE) as (_, lines):
        comments = 0
        while comments < 3:
            comments += next(lines).startswith(":")


def test_a_client_that_leaves_is_noticed_though_nothing_happens_and_others_go_on(
    serve: Callable[[ServiceSettings], Served], settings: ServiceSettings, queue: Queue, job: Job
) -> None:
    served = serve(replace(settings, keep_alive_seconds=1000))
    with follow(served, f"{job.id}/events", **SSE) as (_, staying):
        with follow(served, f"{job.id}/events", **SSE) as (_, lines):
            read_frames(lines, 1)
            wait_until(lambda: served.num_watchers == 2)
        wait_until(lambda: served.num_watchers == 1)
        queue.request_cancel(job.id)
        assert [frame["event"] for frame in read_frames(staying)] == ["queued", "cancelled"]
    wait_until(lambda: served.num_watchers == 0)


def test_watchers_of_one_job_share_its_polls_and_its_pages(
    served: Served, settings: ServiceSettings, queue: Queue, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    polled: list[list[str]] = []
    read: list[str] = []

    def count_polls(database: Database, job_ids: list[str]) -> dict[str, int]:
        polled.append(job_ids)
        return read_last_seqs(database, job_ids)

    def count_reads(*arguments: Any, **options: Any) -> list[Event]:
        read.append(arguments[1])
        return read_events(*arguments, **options)

    counts: list[int] = []

    def watch() -> None:
        with follow(served, f"{lease.job_id}/events", **SSE) as (_, lines):
            counts.append(len(read_frames(lines)))

    threads = [threading.Thread(target=watch) for _ in range(8)]
    for thread in threads:
        thread.start()
    wait_until(lambda: served.num_watchers == 8)
    monkeypatch.setattr("bexp.api.streams.read_last_seqs", count_polls)
    monkeypatch.setattr("bexp.api.streams.read_events", count_reads)
    start = time.monotonic()
    wait_until(lambda: len(polled) >= 10)
    assert len(polled) <= (time.monotonic() - start) / settings.poll_seconds + 2, "one in a tick, however many watch"
    assert polled[0] == [lease.job_id]
    assert read == []
    queue.finish(lease, JobState.SUCCEEDED)
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert counts == [3] * 8
    assert read == [lease.job_id]
    feed = served.app.state.service.feed
    wait_until(lambda: not feed._watches)  # nobody asks for what nobody follows


def test_a_watcher_ahead_of_the_log_does_not_keep_others_busy(served: Served, queue: Queue, lease: Lease) -> None:
    with (
        follow(served, f"{lease.job_id}/events?after=1000000", **SSE) as (_, ahead),
        follow(served, f"{lease.job_id}/events", **SSE) as (_, lines),
    ):
        read_frames(lines, 2)
        wait_until(lambda: served.num_watchers == 2)
        queue.record(lease, make_progress(0))
        assert read_frames(lines, 1)[0]["id"] == "3"
        assert next(ahead) == "retry: 1000"
        served.stop()
        assert read_frames(ahead) == []


def test_a_shutdown_ends_open_streams(served: Served, job: Job) -> None:
    with (
        follow(served, f"{job.id}/events", **SSE) as (_, events),
        follow(served, f"{job.id}/log?follow=true") as (_, log),
    ):
        read_frames(events, 1)
        next(log)
        wait_until(lambda: served.num_watchers == 2)
        assert served.stop() < GRACE_SECONDS
        assert read_frames(events) == []
        assert list(log) == []


def test_a_stalled_reader_holds_up_nobody(served: Served, queue: Queue, lease: Lease) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    message = "x" * 100_000
    with socket.create_connection((host, int(port))) as stalled:
        stalled.sendall(
            f"GET /v1/explorations/{lease.job_id}/log?follow=true HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        )
        for _ in range(100):
            queue.record(lease, Progress(events=(EventDraft(code=EventCode.WARNING, message=message),)))
        with follow(served, f"{lease.job_id}/events?after=101", **SSE) as (_, lines):
            assert [frame["id"] for frame in read_frames(lines, 1)] == ["102"]
