from __future__ import annotations

import base64
import time

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient

from api.examples import REQUEST
from api.routes.explorations import list_explorations
from storage.jobs import Job, JobState
from storage.leases import Lease
from storage.queue import Queue
from storage.tables import jobs
from tests.api.test_submissions import assert_problem
from tests.contracts.samples import make_progress, make_report, make_request

EXPLORATIONS = "/v1/explorations"


def test_pages_hold_every_exploration_once_and_the_newest_first(client: TestClient, queue: Queue) -> None:
    ids = [queue.enqueue(make_request())[0].id for _ in range(5)]
    found: list[str] = []
    cursor: str | None = None
    for _ in range(3):
        params = {"limit": "2"} | ({"cursor": cursor} if cursor else {})
        page = client.get(EXPLORATIONS, params=params).json()
        found += [item["id"] for item in page["items"]]
        cursor = page["next_cursor"]
    assert cursor is None
    assert found == ids[::-1]


def test_explorations_are_listed_by_state(client: TestClient, queue: Queue, lease: Lease) -> None:
    queued, _ = queue.enqueue(make_request())
    running = client.get(EXPLORATIONS, params={"state": "running"}).json()["items"]
    assert [item["id"] for item in running] == [lease.job_id]
    assert [item["id"] for item in client.get(f"{EXPLORATIONS}?state=queued").json()["items"]] == [queued.id]
    assert client.get(f"{EXPLORATIONS}?state=failed").json()["items"] == []


def test_no_list_and_no_event_reads_a_stored_document(
    client: TestClient, queue: Queue, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.record(lease, make_progress(0))

    def refuse(*_: object) -> None:
        raise AssertionError("a stored document is parsed")

    monkeypatch.setattr("storage.jobs.job_from_row", refuse)
    (item,) = client.get(EXPLORATIONS).json()["items"]
    assert (item["model"], item["micro_batch_size"], item["confidence"]) == ("tiny", 1, 45)
    here = f"{EXPLORATIONS}/{lease.job_id}"
    for path in ("trials", "run-reports", "log"):
        assert client.get(f"{here}/{path}").status_code == 200
    assert client.get(f"{here}/events", headers={"Accept": "application/json"}).status_code == 200
    assert client.get(here, headers={"If-None-Match": "*"}).status_code == 304


def test_a_list_of_200_is_written_in_30_milliseconds(client: TestClient, queue: Queue) -> None:
    job, _ = queue.enqueue(make_request())
    with queue.database.begin() as connection:
        row = connection.execute(sa.select(jobs)).one()._asdict()
        connection.execute(sa.insert(jobs), [row | {"id": f"{job.id}{i}"} for i in range(199)])
    service = client.app.state.service  # type: ignore[attr-defined]  # of the application that the client holds
    seconds = []
    for _ in range(5):
        start = time.thread_time()
        page = list_explorations(service, state=None, limit=200, cursor=None)
        page.__pydantic_serializer__.to_json(page)
        seconds.append(time.thread_time() - start)
        assert len(page.items) == 200
    assert min(seconds) <= 0.03


# Each of these is aware, and no time in UTC.
EDGES = [
    base64.urlsafe_b64encode(f"{moment}~a".encode()).decode()
    for moment in ("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-12:00")
]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"),
        ("limit=201", "limit"),
        ("limit=x", "limit"),
        ("limit=NaN", "limit"),
        ("state=done", "state"),
        ("cursor=%00", "cursor"),
        ("cursor=abc", "cursor"),
        ("cursor=%ff", "cursor"),
        ("cursor=" + "A" * 300, "cursor"),
        *((f"cursor={edge}", "cursor") for edge in EDGES),
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


def test_cancelling_a_queued_exploration_ends_it_at_once_and_can_be_repeated(client: TestClient, job: Job) -> None:
    for _ in range(2):
        response = client.post(f"{EXPLORATIONS}/{job.id}/cancel")
        assert response.status_code == 200
        assert response.json()["state"] == "cancelled"


def test_cancelling_a_running_exploration_asks_its_worker(client: TestClient, queue: Queue, lease: Lease) -> None:
    for _ in range(2):
        response = client.post(f"{EXPLORATIONS}/{lease.job_id}/cancel")
        assert response.status_code == 202
        assert response.json()["cancel_requested"]
        assert response.json()["state"] == "running"
    assert queue.heartbeat(lease).cancel_requested
    queue.confirm_cancel(lease)
    assert client.post(f"{EXPLORATIONS}/{lease.job_id}/cancel").status_code == 200


def test_cancelling_changes_nothing_after_the_end(client: TestClient, queue: Queue, lease: Lease) -> None:
    queue.finish(lease, JobState.SUCCEEDED)
    response = client.post(f"{EXPLORATIONS}/{lease.job_id}/cancel")
    assert response.status_code == 200
    assert response.json()["state"] == "succeeded"


def test_a_cancelled_exploration_is_resumed_and_a_finished_one_is_not(
    client: TestClient, queue: Queue, lease: Lease
) -> None:
    path = f"{EXPLORATIONS}/{lease.job_id}"
    queue.finish(lease, JobState.CANCELLED)
    for _ in range(2):
        response = client.post(f"{path}/resume")
        assert (response.status_code, response.json()["state"]) == (202, "queued")
    fingerprint = make_report().hardware.fingerprint
    claim = queue.claim("again", device_kind="cpu", num_devices=1, fingerprint=fingerprint)
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
    response = client.delete(f"{EXPLORATIONS}/{job.id}")
    assert_problem(response, 405)
    assert "GET" in response.headers["Allow"]
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
