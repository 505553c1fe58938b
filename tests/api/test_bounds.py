"""What a request may be: the least and the most of its parameters and bodies, and the names of their types."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from bexp.api.examples import REQUEST
from bexp.storage.jobs import Job
from tests.api.problems import assert_problem
from tests.api.serving import described

ONE = "/v1/explorations/{id}"
LAST = (1 << 31) - 1


@pytest.mark.parametrize(
    ("path", "name", "least", "most", "usual"),
    [
        ("/v1/explorations", "limit", 1, 200, 50),
        ("/v1/audit", "limit", 1, 1000, 100),
        ("/v1/audit", "cursor", 1, (1 << 63) - 1, None),
        (f"{ONE}/trials", "limit", 1, 1000, 100),
        (f"{ONE}/trials", "cursor", -1, LAST, None),
        (f"{ONE}/run-reports", "limit", 1, 1000, 100),
        (f"{ONE}/run-reports", "cursor", 0, LAST, 0),
        (f"{ONE}/events", "limit", 1, 500, 500),
        (f"{ONE}/events", "after", 0, LAST, 0),
        (f"{ONE}/log", "after", 0, LAST, 0),
    ],
)
def test_a_parameter_takes_its_least_and_its_most_and_nothing_beyond(
    client: TestClient, job: Job, path: str, name: str, least: int, most: int, usual: int | None
) -> None:
    parameters = described()["paths"][path.replace("{id}", "{exploration_id}")]["get"]["parameters"]
    (parameter,) = (one for one in parameters if one["name"] == name)
    assert parameter["schema"].get("default") == usual

    def ask(value: int) -> Any:
        headers = {"Accept": "text/plain" if path.endswith("log") else "application/json"}
        return client.get(path.format(id=job.id), params={name: value}, headers=headers)

    for value in (least, most):
        assert ask(value).status_code == 200, ask(value).text
    for value in (least - 1, most + 1):
        assert_problem(refused := ask(value), 422)
        assert [error["field"] for error in refused.json()["errors"]] == [name]


@pytest.mark.parametrize(
    ("path", "name", "most"),
    [
        ("/v1/explorations", "model", 128),
        ("/v1/explorations", "search", 192),
        ("/v1/explorations", "cursor", 256),
        ("/v1/audit", "owner", 64),
        (f"{ONE}/recommendation", "format", 64),
    ],
)
def test_a_text_has_its_most_characters_and_no_more(
    client: TestClient, job: Job, path: str, name: str, most: int
) -> None:
    for length, is_long in ((most, False), (most + 1, True)):
        answer = client.get(path.format(id=job.id), params={name: "x" * length})
        assert ("at most" in answer.text) is is_long, answer.text
        assert not is_long or answer.status_code == 422


def test_a_search_has_eight_words_and_no_more(client: TestClient, job: Job) -> None:
    words = [f"{number}" for number in range(9)]
    assert client.get("/v1/explorations", params={"search": f" {'  '.join(words[:8])} "}).status_code == 200
    assert_problem(refused := client.get("/v1/explorations", params={"search": " ".join(words)}), 422)
    assert [error["field"] for error in refused.json()["errors"]] == ["search"]


@pytest.mark.parametrize(("name", "most", "given"), [("set", 32, "seed={}"), ("label", 16, "a{}=b")])
def test_a_parameter_is_repeated_so_often_and_no_more(client: TestClient, name: str, most: int, given: str) -> None:
    def ask(number: int) -> int:
        params = {name: [given.format(each) for each in range(number)]}
        if name == "label":
            return client.get("/v1/explorations", params=params).status_code
        return client.post("/v1/explorations", params=params, json=REQUEST).status_code

    assert (ask(most), ask(most + 1)) == (202 if name == "set" else 200, 422)


def test_a_problem_names_256_characters_of_a_path(client: TestClient) -> None:
    problems = [client.get("/" + "x" * length).json() for length in (255, 256)]
    paths = [problem["instance"] for problem in problems]
    assert paths == ["/" + "x" * 255, "/" + "x" * 254 + "\N{HORIZONTAL ELLIPSIS}"]
    assert "detail" not in problems[0], "the title says it"


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
        ("PUT", f"{ONE}/notes", {"text": 0}, 32 * 1024),
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


def test_a_body_that_is_no_utf8_is_refused_with_the_place(client: TestClient) -> None:
    headers = {"Content-Type": "application/json"}
    assert_problem(refused := client.post("/v1/explorations", content=b'{"a": "\xff"}', headers=headers), 422)
    assert refused.json()["errors"] == [{"message": "is not UTF-8: invalid byte at offset 7"}]


@pytest.mark.parametrize(
    "media_type",
    ["application/json", "application/vnd.x+json", "APPLICATION/YAML", "application/json; charset=US-ASCII"],
)
def test_json_and_yaml_are_taken_under_each_of_their_names(client: TestClient, media_type: str) -> None:
    assert client.post("/v1/explorations", content=json.dumps(REQUEST), headers={"Content-Type": media_type}).is_success
