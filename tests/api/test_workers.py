"""The list of workers, and answers that are reused because a worker is there."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient

from bexp.explorer.records.event import Progress
from bexp.explorer.records.recommendation import Answer, VariantAnswer
from bexp.storage.jobs import JobState
from bexp.storage.leases import Lease
from bexp.storage.queue import Queue
from bexp.storage.tables import workers
from bexp.storage.workers import register_worker
from tests.contracts.samples import make_recommendation, make_report, make_request, make_worker

EXPLORATIONS = "/v1/explorations"
HARDWARE = make_report().hardware
TARGETS = {"bexp": ""}


def add_worker(queue: Queue, worker_id: str) -> None:
    worker = make_worker(
        *(worker_id, HARDWARE.device_kind, 1, HARDWARE.fingerprint),
        memory_limit_bytes=HARDWARE.memory_limit_bytes,
        targets=TARGETS,
        devices="cpu",
        versions={"torch": "2.13"},
    )
    register_worker(queue.database, worker)


def listed(client: TestClient) -> dict[str, dict[str, Any]]:
    return {worker["id"]: worker for worker in client.get("/v1/workers").json()["items"]}


def test_workers_say_what_they_have_and_what_they_do(client: TestClient, queue: Queue, lease: Lease) -> None:
    assert listed(client) == {}
    for name in ("worker-1", "worker-2", "worker-3"):
        add_worker(queue, name)
    with queue.database.begin() as connection:
        silent = sa.update(workers).where(workers.c.id == "worker-3")
        connection.execute(silent.values(last_seen_at=queue.database.clock(-timedelta(hours=1))))
    found = listed(client)
    assert [(worker["state"], worker["exploration"]) for worker in found.values()] == [
        *(("measuring", lease.job_id), ("idle", None), ("lost", None))
    ]
    lost, idle = found["worker-3"], found["worker-2"]
    assert lost["lost_since"] == lost["last_heartbeat_at"]
    assert idle["lost_since"] is None
    assert (idle["device_name"], idle["devices"], idle["num_devices"]) == ("A device", "cpu", 1)
    assert (idle["versions"], idle["targets"]) == ({"torch": "2.13"}, TARGETS)
    assert (idle["memory_bytes"], idle["reserved"], "name" in idle) == (2 << 30, False, False)
    started = client.get(f"{EXPLORATIONS}/{lease.job_id}").json()["started_at"]
    about = [(worker["exploration_model"], worker["exploration_started_at"]) for worker in found.values()]
    assert about == [("tiny", started), (None, None), (None, None)]
    assert "gpus" not in idle, "NVML says nothing"
    gpus = [{"device": "cuda:0", "busy_share": 0.93, "temperature_celsius": 61}, {"device": "cuda:1"}]
    register_worker(queue.database, make_worker("worker-2", gpus=gpus))
    assert listed(client)["worker-2"]["gpus"] == gpus
    register_worker(queue.database, make_worker("own", name="me"))
    assert listed(client)["own"]["reserved"]


def test_a_worker_that_waits_says_whom_for(client: TestClient, queue: Queue) -> None:
    register_worker(queue.database, replace(make_worker("new", device_name="", fingerprint=""), held_by="by 7"))
    add_worker(queue, "idle")
    assert [(name, worker["state"], worker["held_by"]) for name, worker in listed(client).items()] == [
        *(("idle", "idle", None), ("new", "waiting", "by 7"))
    ]


@pytest.fixture
def measured(queue: Queue, lease: Lease) -> str:
    """An exploration that has measured its answer."""
    best = make_recommendation().model_copy(update={"confidence": 97})
    answer = Answer(variants=(VariantAnswer(num_query_groups=4, num_parameters=1, recommendation=best),))
    queue.finish(lease, JobState.SUCCEEDED, last=Progress(recommendation=best, answer=answer))
    return lease.job_id


def test_the_same_request_is_answered_at_once(client: TestClient, queue: Queue, measured: str) -> None:
    body = make_request().model_dump(mode="json")
    assert client.post(EXPLORATIONS, json=body | {"fresh": True}).status_code == 202
    queued = client.post(EXPLORATIONS, json=body)
    assert (queued.status_code, queued.json()["answered_from"]) == (202, None)
    add_worker(queue, "worker-1")
    headers = {"Idempotency-Key": "k"}
    response = client.post(EXPLORATIONS, json=body | {"labels": {"run": "2"}}, headers=headers)
    assert response.status_code == 201
    found = response.json()
    assert response.headers["Location"] == found["links"]["self"]
    assert (found["state"], found["confidence"], found["labels"]) == ("succeeded", 97, {"run": "2"})
    first = client.get(f"{EXPLORATIONS}/{measured}").json()
    assert found["answered_from"] == {"exploration": measured, "measured_at": first["finished_at"]}
    assert found["answer"] == first["answer"]
    again = client.post(EXPLORATIONS, json=body | {"labels": {"run": "2"}}, headers=headers)
    assert again.json()["id"] == found["id"]
    newest = client.get(EXPLORATIONS).json()["items"][0]
    assert (newest["id"], newest["answered_from"]["exploration"]) == (found["id"], measured)
