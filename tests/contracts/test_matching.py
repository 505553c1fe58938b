"""Which worker takes which job, and the reason of one that no worker takes: they never disagree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from bexp.explorer.request.request import ExplorationRequest
from bexp.storage.database import Database
from bexp.storage.jobs import get_job
from bexp.storage.queue import Queue
from bexp.storage.tables import workers
from bexp.storage.waiting import find_reason
from bexp.storage.workers import WorkerInfo, forget_worker, register_worker
from tests.contracts.jobs import store
from tests.contracts.samples import make_report, make_request, make_worker

GIB = 1 << 30
NO_GRACE = timedelta(0)


def gpu(worker_id: str, name: str, gib: float, **changes: Any) -> WorkerInfo:
    told = {"device_name": name, "memory_bytes": round(gib * GIB), "fingerprint": name, "devices": "cuda:0"}
    return make_worker(worker_id, **{"device_kind": "cuda", "host": worker_id, **told, **changes})


T4, H100 = gpu("t4", "Tesla T4", 14.6), gpu("h100", "NVIDIA H100 80GB HBM3", 79.1)
CPU = make_worker("cpu", fingerprint="cpu")
RECORDED = gpu("recorded", "NVIDIA H200, replayed", 139.8)
OWN_CPU, OWN_H100 = replace(CPU, id="own", name="me"), replace(H100, id="own-h100", name="me")
CONTEXT_PARALLEL = {"num_devices": 4, "batch_size": 8, "context_parallel": {"sizes": [2]}}
PINNED = {"fingerprint": T4.fingerprint, "report": make_report("Tesla T4", "cuda").model_dump(mode="json")}

REQUESTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "any": ({}, {}),
    "cpu": ({"device_kind": "cpu"}, {}),
    "cuda": ({"device_kind": "cuda"}, {}),
    "70 GiB": ({"memory_limit_gib": 70}, {}),
    "80 GiB": ({"memory_limit_gib": 80}, {}),
    "100 GiB": ({"memory_limit_gib": 100}, {}),
    "two devices": (CONTEXT_PARALLEL, {}),
    "target": ({"model": None, "target": "my-gpt"}, {}),
    "begun": ({}, PINNED),
    "own": ({}, {"own_worker": "me"}),
    "own 70 GiB": ({"memory_limit_gib": 70}, {"own_worker": "me"}),
    "another's": ({}, {"own_worker": "somebody"}),
}
FLEETS: dict[str, Sequence[WorkerInfo]] = {
    "none": (),
    "CPU": (CPU,),
    "T4": (T4,),
    "H100": (H100,),
    "T4 and H100": (T4, H100),
    "CPU and T4": (CPU, T4),
    "own CPU": (OWN_CPU,),
    "own H100 and CPU": (OWN_H100, CPU),
    "CPU and recorded": (CPU, RECORDED),
    "two H100 in one": (replace(H100, num_devices=2, devices="cuda:0+1"), CPU),
    "another target": (replace(H100, targets={"my-gpt": "1"}),),
}


def submit(database: Database, kind: str) -> str:
    fields, stored = REQUESTS[kind]
    job, _ = Queue(database).enqueue(make_request(**fields))
    if stored:
        store(database, job.id, **stored)
    return job.id


def takers(database: Database, job_id: str, fleet: Sequence[WorkerInfo]) -> list[str]:
    """Who of them claims the job, each asked alone."""
    queue, found = Queue(database), []
    for worker in fleet:
        claim = queue.claim(worker)
        if claim is not None:
            assert claim.job.id == job_id
            queue.release(claim.lease)
            found.append(worker.id)
    return found


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_job_waits_for_a_reason_if_and_only_if_nobody_takes_it(database: Database, kind: str) -> None:
    job_id = submit(database, kind)
    for fleet in FLEETS.values():
        for worker in fleet:
            register_worker(database, worker)
        reason = find_reason(database, job_id)
        measuring = [worker for worker in fleet if not worker.is_replayed]
        assert (reason is None) == bool(takers(database, job_id, measuring)), (fleet, reason)
        for worker in fleet:
            forget_worker(database, worker.id)


@pytest.mark.parametrize(
    ("kind", "fleet", "expected"),
    [
        ("any", "T4 and H100", ["t4", "h100"]),
        ("70 GiB", "T4 and H100", ["h100"]),
        ("80 GiB", "T4 and H100", ["h100"]),  # a card of 80 GB has fewer GiB
        ("100 GiB", "T4 and H100", "none with 100 GiB of memory is running"),
        ("70 GiB", "T4", "none with 70 GiB of memory is running"),
        ("cuda", "CPU", "none with a cuda device is running"),
        ("two devices", "T4 and H100", "none with 2 devices is running"),
        ("any", "CPU and T4", ["t4"]),
        ("cpu", "CPU and T4", ["cpu"]),
        ("70 GiB", "CPU and T4", "none with 70 GiB of memory is running"),
        ("two devices", "two H100 in one", ["h100"]),
        ("target", "CPU and T4", "none with the target 'my-gpt' is running"),
        ("begun", "T4 and H100", ["t4"]),
        ("begun", "H100", "none with the hardware that this exploration started on is running (Tesla T4, 1.0 GiB, "),
        ("any", "CPU and recorded", ["cpu", "recorded"]),
        ("any", "own CPU", "none is running"),
        ("any", "own H100 and CPU", ["cpu"]),
        ("own", "CPU and T4", "its own worker has ended"),
        ("own", "own CPU", ["own"]),
        ("own", "own H100 and CPU", ["own-h100"]),
        ("own 70 GiB", "own CPU", "its own worker is none with 70 GiB of memory"),
        ("another's", "own H100 and CPU", "its own worker has ended"),
    ],
)
def test_who_takes_a_job(database: Database, kind: str, fleet: str, expected: list[str] | str) -> None:
    job_id = submit(database, kind)
    for worker in FLEETS[fleet]:
        register_worker(database, worker)
    found = takers(database, job_id, FLEETS[fleet])
    if isinstance(expected, list):
        assert found == expected
    else:
        assert found == []
        assert (find_reason(database, job_id) or "").startswith(expected)


def test_a_cpu_leaves_to_gpus_what_names_no_device_as_long_as_one_lives(database: Database) -> None:
    first, second = submit(database, "any"), submit(database, "any")
    register_worker(database, T4)
    queue = Queue(database)
    claim = queue.claim(T4)
    assert claim is not None
    assert queue.claim(CPU) is None, "the GPU measures, and is next"
    with database.begin() as connection:
        connection.execute(sa.update(workers).values(last_seen_at=database.clock(-timedelta(minutes=1))))
    claims = [queue.claim(CPU), queue.claim(CPU)]
    assert [claim and claim.job.id for claim in claims] == [({first, second} - {claim.job.id}).pop(), None]


def test_hosts_whose_devices_have_the_same_names_are_told_apart(database: Database) -> None:
    here, there = (replace(H100, id=name, host=name, name=name) for name in ("here", "there"))
    queue = Queue(database)
    job, _ = queue.enqueue(make_request(), own_worker="here")
    for worker in (here, there, H100):
        register_worker(database, worker)
    assert takers(database, job.id, (there, H100, here)) == ["here"]


def test_what_a_request_needs_is_stored_with_it(database: Database) -> None:
    asked = make_request(memory_limit_gib=1.5)
    job, _ = Queue(database).enqueue(asked)
    assert isinstance(job.request, ExplorationRequest)
    tight, enough = (make_worker(memory_bytes=round(gib * GIB)) for gib in (1.3, 1.4))
    assert takers(database, job.id, (tight, enough)) == ["a"]
    assert get_job(database, job.id).request == asked
