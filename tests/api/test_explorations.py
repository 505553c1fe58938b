from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient

from bexp.api.examples import REQUEST
from bexp.storage.jobs import Job, JobState
from bexp.storage.leases import Lease
from bexp.storage.queue import Queue
from bexp.storage.tables import jobs
from bexp.storage.workers import register_worker
from tests.api.problems import assert_problem
from tests.api.serving import Served
from tests.api.test_logs import follow
from tests.contracts.samples import make_progress, make_report, make_request, make_worker
from tests.waits import wait_until

EXPLORATIONS = "/v1/explorations"


def test_explorations_are_listed_by_label_model_and_state(client: TestClient, queue: Queue, lease: Lease) -> None:
    def submit(name: str, labels: dict[str, str]) -> str:
        document = REQUEST | {"model": REQUEST["model"] | {"name": name}, "labels": labels}
        submitted: str = client.post(EXPLORATIONS, json=document).json()["id"]
        return submitted

    both = submit("a", {"team": "search", "run": "x=1 & é"})
    one = submit("a", {"team": "search"})
    other = submit("b", {"team": "ads"})

    def listed(**query: str | list[str]) -> list[str]:
        items = client.get(EXPLORATIONS, params=query).json()["items"]
        return [item["id"] for item in items]

    assert listed(label="team=search") == [one, both]
    assert listed(label=["team=search", "run=x=1 & é"]) == [both]
    assert listed(label=["team=search", "team=ads"]) == []
    assert listed(model="a") == [one, both]
    assert listed(model="b", label="team=ads", state="queued") == [other]
    assert listed(model="b", state="running") == []
    assert lease.job_id in listed()
    (item,) = client.get(EXPLORATIONS, params={"model": "b"}).json()["items"]
    assert item["labels"] == {"team": "ads"}
    assert client.get(f"{EXPLORATIONS}/{both}").json()["labels"] == {"team": "search", "run": "x=1 & é"}


def test_a_cursor_stays_good_while_explorations_come_and_go(client: TestClient, queue: Queue) -> None:
    labels = {"team": "search"}
    ids = [queue.enqueue(make_request(labels=labels))[0].id for _ in range(5)]
    query = {"label": "team=search", "limit": "2"}
    first = client.get(EXPLORATIONS, params=query).json()
    queue.enqueue(make_request(labels=labels))
    for job_id in (ids[3], ids[2]):  # the last of that page, at which the cursor points, and the first of the next
        queue.request_cancel(job_id)
        assert client.delete(f"{EXPLORATIONS}/{job_id}").status_code == 204
    second = client.get(EXPLORATIONS, params=query | {"cursor": first["next_cursor"]}).json()
    assert [item["id"] for item in (*first["items"], *second["items"])] == [ids[4], ids[3], ids[1], ids[0]]
    assert second["next_cursor"] is None


@pytest.mark.parametrize(
    "labels",
    [
        {"": "v"},
        {"-a": "v"},
        {"a b": "v"},
        {"a" * 64: "v"},
        {"a": ""},
        {"a": " v"},
        {"a": "v" * 129},
        {"a": "one\ntwo"},
        {"a": 7},
        {f"k{i}": "v" for i in range(17)},
        ["a"],
    ],
)
def test_labels_have_limits(client: TestClient, labels: Any) -> None:
    response = client.post(EXPLORATIONS, json=REQUEST | {"labels": labels})
    assert_problem(response, 422)
    assert response.json()["errors"][0]["field"].startswith("labels")


def test_no_list_and_no_event_reads_a_stored_document(
    client: TestClient, queue: Queue, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.record(lease, make_progress(0))

    def refuse(*_: object) -> None:
        raise AssertionError("a stored document is parsed")

    monkeypatch.setattr("bexp.storage.jobs.job_from_row", refuse)
    (item,) = client.get(EXPLORATIONS).json()["items"]
    assert (item["model"], item["micro_batch_size"], item["confidence"]) == ("tiny", 1, 45)
    here = f"{EXPLORATIONS}/{lease.job_id}"
    for path in ("trials", "run-reports", "log"):
        assert client.get(f"{here}/{path}").status_code == 200
    assert client.get(f"{here}/events", headers={"Accept": "application/json"}).status_code == 200
    assert client.get(here, headers={"If-None-Match": "*"}).status_code == 304


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("labels=team%3Dsearch", "labels"),
        ("limit=x", "limit"),
        ("limit=NaN", "limit"),
        ("state=done", "state"),
        ("label=team", "label"),
        ("label=team=", "label"),
        ("label=%3Da", "label"),
        ("label=a%00=b", "label"),
        ("cursor=%00", "cursor"),
        ("cursor=abc", "cursor"),
        ("cursor=%ff", "cursor"),
    ],
)
def test_odd_parameters_are_named(client: TestClient, query: str, field: str) -> None:
    response = client.get(f"{EXPLORATIONS}?{query}")
    assert_problem(response, 422)
    assert [error["field"] for error in response.json()["errors"]] == [field]


def test_an_unchanged_exploration_is_not_sent_again(client: TestClient, queue: Queue, lease: Lease) -> None:
    path = f"{EXPLORATIONS}/{lease.job_id}"
    first = client.get(path)
    etag = first.headers["ETag"]
    for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        unchanged = client.get(path, headers={"If-None-Match": known})
        assert unchanged.status_code == 304, known
        assert unchanged.headers["ETag"] == etag
        assert unchanged.content == b""

    queue.record(lease, make_progress(0))
    changed = client.get(path, headers={"If-None-Match": etag})
    assert changed.status_code == 200
    assert changed.headers["ETag"] != etag
    assert changed.json()["micro_batch_size"] == 1
    assert changed.json()["recommendation"]["confidence"] == 45
    assert changed.json()["report"]["hardware"]["device_name"] == "A device"


def test_a_queued_exploration_shows_its_place_which_others_change(client: TestClient, queue: Queue) -> None:
    ids = [queue.enqueue(make_request(seed=seed))[0].id for seed in range(2)]
    path = f"{EXPLORATIONS}/{ids[1]}"
    first = client.get(path)
    assert first.json()["queue"] == {"place": 2, "num_queued": 2, "busy_until": None}
    assert first.json()["waiting_reason"] == "none is running", "although it was just submitted"
    assert client.get(path, headers={"If-None-Match": first.headers["ETag"]}).status_code == 304
    register_worker(queue.database, make_worker())
    claim = queue.claim(make_worker())
    assert claim is not None and claim.job.id == ids[0]
    changed = client.get(path, headers={"If-None-Match": first.headers["ETag"]})
    assert changed.status_code == 200, "its own row is as it was"
    began, place = claim.job.started_at, changed.json()["queue"]
    assert began is not None
    until = datetime.fromisoformat(place.pop("busy_until"))
    assert (place, until) == ({"place": 1, "num_queued": 1}, began + timedelta(seconds=600))
    assert re.fullmatch(r'"[!-~]+"', changed.headers["ETag"])
    assert client.get(f"{EXPLORATIONS}/{ids[0]}").json()["queue"] is None


def test_cancelling_a_running_exploration_asks_its_worker(client: TestClient, queue: Queue, lease: Lease) -> None:
    for _ in range(2):
        response = client.post(f"{EXPLORATIONS}/{lease.job_id}/cancel")
        assert response.status_code == 202
        assert response.json()["cancel_requested"]
        assert response.json()["state"] == "running"
    assert queue.heartbeat(lease).cancel_requested
    queue.finish(lease, JobState.CANCELLED)
    assert client.post(f"{EXPLORATIONS}/{lease.job_id}/cancel").status_code == 200


def test_what_has_ended_can_be_deleted_with_all_that_belongs_to_it(
    client: TestClient, queue: Queue, lease: Lease
) -> None:
    here = f"{EXPLORATIONS}/{lease.job_id}"
    response = client.delete(here)
    assert_problem(response, 409)
    assert response.json()["type"] == "urn:bexp:problem:not-finished"
    assert f"{here}/cancel" in response.json()["detail"]
    queue.record(lease, make_progress(0))
    queue.finish(lease, JobState.FAILED)
    assert client.delete(here).status_code == 204
    for path in ("", "/events", "/log", "/trials", "/recommendation", "/run-reports"):
        assert_problem(client.get(f"{here}{path}"), 404)
    assert_problem(client.delete(here), 404)
    assert client.get(EXPLORATIONS).json()["items"] == []


def test_a_stream_ends_when_its_exploration_is_deleted(served: Served, queue: Queue, lease: Lease) -> None:
    with follow(served, f"{lease.job_id}/log?follow=true&after=2") as (_, lines):
        wait_until(lambda: served.num_watchers == 1)
        with queue.database.begin() as connection:  # ended and deleted between two looks of the stream
            connection.execute(sa.delete(jobs))
        assert list(lines) == []


def test_notes_are_written_and_have_no_control_characters(client: TestClient, lease: Lease) -> None:
    path = f"{EXPLORATIONS}/{lease.job_id}"
    assert client.get(path).json()["notes"] is None
    tag = client.get(path).headers["ETag"]
    for text in ("<b>\t\u00e9\n", "x" * 4000):
        assert client.put(f"{path}/notes", json={"text": text}).json()["notes"] == text
        assert client.get(path, headers={"If-None-Match": tag}).json()["notes"] == text
    for refused in ("x" * 4001, "\x1b[2J", "\x00", "\x9b", 1):
        assert_problem(client.put(f"{path}/notes", json={"text": refused}), 422)
    assert client.put(f"{path}/notes", json={"text": ""}).json()["notes"] is None


def test_a_cancelled_exploration_is_resumed_and_a_finished_one_is_not(
    client: TestClient, queue: Queue, lease: Lease
) -> None:
    path = f"{EXPLORATIONS}/{lease.job_id}"
    queue.finish(lease, JobState.CANCELLED)
    for _ in range(2):
        response = client.post(f"{path}/resume")
        assert (response.status_code, response.json()["state"]) == (202, "queued")
    fingerprint = make_report().hardware.fingerprint
    claim = queue.claim(make_worker("again", fingerprint=fingerprint))
    assert claim is not None
    queue.finish(claim.lease, JobState.SUCCEEDED)
    response = client.post(f"{path}/resume")
    assert (response.status_code, response.json()["type"]) == (409, "urn:bexp:problem:finished")
    events = client.get(f"{path}/events").text  # the stream goes on after the first end
    assert [name for name in ("event: cancelled", "event: succeeded") if name in events] == [
        "event: cancelled",
        "event: succeeded",
    ]


@pytest.mark.parametrize("job_id", ["0" * 16, "x", "..", "%00", "%ff", "%F0%9F%90%88", "a" * 500, "1;drop"])
@pytest.mark.parametrize("part", ["", "/events", "/log", "/recommendation", "/trials"])
def test_an_unknown_exploration_is_not_found(client: TestClient, job_id: str, part: str) -> None:
    assert_problem(client.get(f"{EXPLORATIONS}/{job_id}{part}"), 404)


def test_other_methods_and_paths_are_refused_in_the_same_shape(client: TestClient, job: Job) -> None:
    assert_problem(client.post(f"{EXPLORATIONS}/{'0' * 16}/cancel"), 404)
    response = client.put(f"{EXPLORATIONS}/{job.id}")
    assert_problem(response, 405)
    assert response.headers["Allow"] == "DELETE, GET"
    assert client.put(EXPLORATIONS).headers["Allow"] == "GET, POST"
    assert client.post("/healthz").headers["Allow"] == "GET, HEAD"
    assert_problem(client.get("/v2"), 404)
    assert_problem(client.get(f"{EXPLORATIONS}/"), 404)


def test_a_client_that_wants_no_json_is_told(client: TestClient) -> None:
    assert_problem(client.get(EXPLORATIONS, headers={"Accept": "text/html"}), 406)
    browser = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
    assert client.get(EXPLORATIONS, headers={"Accept": browser}).status_code == 200


def test_a_fault_is_a_problem_without_its_details(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a secret detail")

    monkeypatch.setattr(Queue, "enqueue", fail)
    response = client.post(EXPLORATIONS, json=REQUEST)
    assert_problem(response, 500)
    assert "secret" not in response.text


def test_what_another_version_stored_does_not_break_the_list(client: TestClient, queue: Queue) -> None:
    old, new = (queue.enqueue(make_request())[0] for _ in range(2))
    with queue.database.begin() as connection:
        document = {"model": {"name": "old"}, "lost_field": 1}
        connection.execute(sa.update(jobs).where(jobs.c.id == old.id).values(request=document))
    items = client.get(EXPLORATIONS).json()["items"]
    assert [(item["id"], item["model"]) for item in items] == [(new.id, "tiny"), (old.id, "tiny")]
    found = client.get(f"{EXPLORATIONS}/{old.id}").json()
    assert found["request"] is None
    assert "another version" in found["error"]
    assert client.post(f"{EXPLORATIONS}/{old.id}/cancel").json()["state"] == "cancelled"
