from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from bexp.api.examples import RUN_REPORT
from bexp.storage.jobs import Job
from bexp.storage.leases import Lease
from bexp.storage.queue import Queue
from tests.api.problems import assert_problem
from tests.contracts.samples import make_progress

REPORT: dict[str, Any] = RUN_REPORT["report"]


def path_of(job_id: str) -> str:
    return f"/v1/explorations/{job_id}/run-reports"


@pytest.fixture
def path(queue: Queue, lease: Lease) -> str:
    """Where the reports of an exploration with a recommendation are."""
    queue.record(lease, make_progress(0))
    return path_of(lease.job_id)


def test_a_report_is_stored_and_listed(client: TestClient, path: str) -> None:
    assert client.get(path).json() == {"items": [], "next_cursor": None}
    response = client.post(path, json=REPORT)
    assert response.status_code == 201
    assert response.headers["Location"] == path
    assert response.json()["report"] == REPORT
    client.post(path, json=REPORT | {"steps": 7})
    first = client.get(path, params={"limit": 1}).json()
    assert first["items"] == [response.json()]
    rest = client.get(path, params={"cursor": first["next_cursor"]}).json()
    assert [item["report"]["steps"] for item in rest["items"]] == [7]
    assert rest["next_cursor"] is None


def test_a_report_about_nothing_is_refused(client: TestClient, job: Job) -> None:
    assert_problem(client.post(path_of("0" * 16), json=REPORT), 404)
    assert_problem(client.get(path_of("0" * 16)), 404)
    refused = client.post(path_of(job.id), json=REPORT)
    assert_problem(refused, 409)
    assert refused.json()["type"] == "urn:bexp:problem:no-recommendation"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tokens_per_second": float("nan")}, "tokens_per_second"),
        ({"tokens_per_second": 0}, "tokens_per_second"),
        ({"seconds": -1}, "seconds"),
        ({"seconds": float("inf")}, "seconds"),
        ({"peak_bytes": -1}, "peak_bytes"),
        ({"steps": 0}, "steps"),
        ({"steps": 10**30}, "steps"),
        ({"hardware": ""}, "hardware"),
        ({"hardware": "a\0b"}, "hardware"),
        ({"versions": {f"library{i}": "1" for i in range(33)}}, "versions"),
        ({"finished_at": "yesterday"}, "finished_at"),
        ({"finished_at": "2026-03-01T12:00:00"}, "finished_at"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_bad_report_names_the_field(client: TestClient, path: str, changes: dict[str, Any], field: str) -> None:
    response = client.post(path, content=json.dumps(REPORT | changes), headers={"Content-Type": "application/json"})
    assert_problem(response, 422)
    assert [error["field"] for error in response.json()["errors"]] == [field]
