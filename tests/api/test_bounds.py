"""What a request may be: the least and the most of its parameters and bodies, and the names of their types."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from bexp.api.examples import REQUEST
from bexp.storage.jobs import Job
from tests.api.problems import assert_problem

ONE = "/v1/explorations/{id}"
LAST = (1 << 31) - 1


@pytest.mark.parametrize(
    ("path", "name", "least", "most"),
    [
        ("/v1/explorations", "limit", 1, 200),
        ("/v1/audit", "limit", 1, 1000),
        ("/v1/audit", "cursor", 1, (1 << 63) - 1),
        (f"{ONE}/trials", "limit", 1, 1000),
        (f"{ONE}/trials", "cursor", -1, LAST),
        (f"{ONE}/run-reports", "limit", 1, 1000),
        (f"{ONE}/run-reports", "cursor", 0, LAST),
        (f"{ONE}/events", "limit", 1, 500),
        (f"{ONE}/events", "after", 0, LAST),
        (f"{ONE}/log", "after", 0, LAST),
    ],
)
def test_a_parameter_takes_its_least_and_its_most_and_nothing_beyond(
    client: TestClient, job: Job, path: str, name: str, least: int, most: int
) -> None:
    def ask(value: int) -> Any:
        headers = {"Accept": "text/plain" if path.endswith("log") else "application/json"}
        return client.get(path.format(id=job.id), params={name: value}, headers=headers)

    for value in (least, most):
        assert ask(value).status_code == 200, ask(value).text
    for value in (least - 1, most + 1):
        assert_problem(refused := ask(value), 422)
        assert [error["field"] for error in refused.json()["errors"]] == [name]


@pytest.mark.parametrize(("priority", "status"), [(-101, 422), (-100, 202), (100, 202), (101, 422)])
def test_a_priority_is_between_minus_100_and_100(client: TestClient, priority: int, status: int) -> None:
    assert client.post("/v1/explorations", json=REQUEST, params={"priority": priority}).status_code == status


@pytest.mark.parametrize(
    ("limit", "most"), [("max_queued", 2 * 10**9), ("max_running", 2 * 10**9), ("max_stored_bytes", 1 << 50)]
)
def test_a_quota_is_between_nothing_and_its_most(client: TestClient, limit: str, most: int) -> None:
    def put(value: int) -> Any:
        return client.put("/v1/owners/team-a/quota", json={limit: value})

    assert [put(value).status_code for value in (-1, 0, most, most + 1)] == [422, 200, 200, 422]
    assert client.get("/v1/owners/team-a/quota").json()[limit] == most


@pytest.mark.parametrize(
    ("method", "path", "document", "most"),
    [
        ("PUT", "/v1/owners/team-a/quota", {"max_queued": 1}, 4 * 1024),
        ("POST", f"{ONE}/run-reports", {"steps": 0}, 16 * 1024),
        ("POST", "/v1/explorations", {"batch_size": 0}, 256 * 1024),
    ],
)
def test_a_body_is_read_up_to_its_most(
    client: TestClient, job: Job, method: str, path: str, document: dict[str, int], most: int
) -> None:
    body, headers = json.dumps(document).encode(), {"Content-Type": "application/json"}
    statuses = [
        client.request(method, path.format(id=job.id), content=body.ljust(size), headers=headers).status_code
        for size in (most, most + 1)
    ]
    assert statuses[0] in {200, 422}
    assert statuses[1] == 413


@pytest.mark.parametrize(
    "media_type",
    ["application/json", "application/vnd.x+json", "APPLICATION/YAML", "application/json; charset=US-ASCII"],
)
def test_json_and_yaml_are_taken_under_each_of_their_names(client: TestClient, media_type: str) -> None:
    assert client.post("/v1/explorations", content=json.dumps(REQUEST), headers={"Content-Type": media_type}).is_success
