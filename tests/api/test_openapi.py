from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]  # it has no types
import pytest
from fastapi.testclient import TestClient
from pydantic import BaseModel, TypeAdapter

from bexp.api import examples, resources
from bexp.api.refusals import Problem
from bexp.api.settings import ServiceSettings
from bexp.client.explorations import Exploration, Result
from tests.api.serving import Served
from tests.waits import PATIENCE_SECONDS


def operations(document: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{method} {path}", operation)
        for path, item in document["paths"].items()
        for method, operation in item.items()
    ]


@pytest.fixture
def document(client: TestClient) -> dict[str, Any]:
    described: dict[str, Any] = client.get("/openapi.json").json()
    return described


def test_every_route_has_a_summary_and_examples(document: dict[str, Any]) -> None:
    for name, operation in operations(document):
        assert operation["summary"], name
        for status, response in operation["responses"].items():
            if status in {"204", "304"}:
                continue
            assert response.get("content"), f"{name} {status}"
            for media_type, content in response["content"].items():
                assert "example" in content, f"{name} {status} {media_type}"
        for content in operation.get("requestBody", {}).get("content", {}).values():
            assert "example" in content, name


def test_the_document_is_encoded_once(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    first = client.get("/openapi.json")
    monkeypatch.delattr("json.dumps")
    again = client.get("/openapi.json", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/openapi.json").content == first.content


def test_who_asks_for_it_first_keeps_nobody_waiting(
    serve: Callable[[ServiceSettings], Served], settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(settings)
    started, may_end, calls = threading.Event(), threading.Event(), list[None]()

    def describe() -> dict[str, Any]:
        calls.append(None)
        started.set()
        may_end.wait()
        return {}

    monkeypatch.setattr(served.app, "openapi", describe)
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(httpx.get, f"{served.url}/openapi.json", timeout=PATIENCE_SECONDS) for _ in range(3)]
        try:
            assert started.wait(PATIENCE_SECONDS)
            assert httpx.get(f"{served.url}/healthz", timeout=PATIENCE_SECONDS).is_success
        finally:
            may_end.set()
        assert [one.result().json() for one in asked] == [{}] * 3
    assert len(calls) == 1


STATUSES = {
    "post /v1/explorations": {201, 202, 413, 415, 422},
    "delete /v1/explorations/{exploration_id}": {204, 404, 409, 422},
    "get /v1/explorations/{exploration_id}": {200, 304, 404, 422},
    "post /v1/explorations/{exploration_id}/cancel": {200, 202, 404, 422},
    "put /v1/explorations/{exploration_id}/notes": {200, 404, 413, 415, 422},
    "post /v1/explorations/{exploration_id}/resume": {202, 404, 409, 422},
    "get /v1/explorations/{exploration_id}/recommendation": {200, 404, 409, 422},
    "get /v1/explorations/{exploration_id}/comparison": {200, 404, 409, 422},
    "post /v1/explorations/{exploration_id}/run-reports": {201, 404, 409, 413, 415, 422},
    "get /v1/explorations/{exploration_id}/events": {200, 204, 404, 422},
    "put /v1/owners/{owner}/quota": {200, 404, 413, 415, 422},
    "get /v1/owners/{owner}/quota": {200, 404, 422},
}
"""What routes answer beyond 200, 422, and 404 where an exploration is named; those of `Reader`s are left out."""


def test_the_statuses_of_each_route_are_described(document: dict[str, Any]) -> None:
    everywhere = {"401", "403", "406", "429", "503"}
    for name, operation in operations(document):
        path = name.partition(" ")[2]
        usual = {200, 422} | ({404} if "{" in path else set()) if path.startswith("/v1/") else {200}
        expected = set(map(str, STATUSES.get(name, usual)))
        assert set(operation["responses"]) - everywhere == expected, name


def test_a_generated_client_has_a_short_name_for_each_route(document: dict[str, Any]) -> None:
    names = [operation["operationId"] for _, operation in operations(document)]
    assert len(set(names)) == len(names)
    assert {"submit_exploration", "list_explorations", "follow_events"} <= set(names)


def test_errors_are_described_as_problems(document: dict[str, Any]) -> None:
    for name, operation in operations(document):
        for status, response in operation["responses"].items():
            if int(status) >= 400:
                assert set(response["content"]) == {"application/problem+json"}, f"{name} {status}"
                example = Problem.model_validate(response["content"]["application/problem+json"]["example"])
                assert example.status == int(status)


def test_protected_routes_describe_what_they_refuse(document: dict[str, Any]) -> None:
    for name, operation in operations(document):
        if "security" in operation:
            limited = {"401", "403", "429"} if name == "get /metrics" else {"401", "403", "406", "429"}
            assert limited <= set(operation["responses"]), name


def test_every_reference_resolves(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]

    def check(node: Any) -> None:
        if isinstance(node, dict):
            if isinstance(reference := node.get("$ref"), str):
                assert reference.removeprefix("#/components/schemas/") in schemas, reference
            for value in node.values():
                check(value)
        elif isinstance(node, list):
            for value in node:
                check(value)

    check(document)


@pytest.mark.parametrize(
    ("model", "example"),
    [
        (Exploration, examples.EXPLORATION),
        (Exploration, examples.QUEUED),
        (Exploration, examples.ANSWERED),
        (resources.ExplorationPage, examples.PAGE),
        (resources.WorkerList, examples.WORKERS),
        (Result, examples.RECOMMENDATION),
        (resources.EventPage, examples.EVENTS),
        (resources.TrialPage, examples.TRIALS),
        (resources.RunReportResource, examples.RUN_REPORT),
        (resources.RunReportPage, examples.RUN_REPORTS),
        (resources.AuditPage, examples.AUDIT),
        (resources.QuotaList, examples.QUOTAS),
    ],
)
def test_the_examples_are_what_the_service_answers(model: type[BaseModel], example: dict[str, Any]) -> None:
    assert TypeAdapter(model).validate_python(example, extra="forbid").model_dump(mode="json") == example


def test_the_examples_tell_of_one_exploration() -> None:
    shown, best = examples.EXPLORATION, examples.RECOMMENDATION["recommendation"]
    request, candidate = shown["request"], best["candidate"]
    assert shown["recommendation"] == best
    known = {name: shown[name] for name in ("performance", "tokens_per_second", "confidence", "micro_batch_size")}
    assert known == {name: {**best, **candidate}[name] for name in known}
    assert (shown["confidence_target"], shown["labels"]) == (request["budget"]["confidence_target"], request["labels"])
    assert candidate["micro_batch_size"] * best["grad_accum_steps"] == request["batch_size"]
    steps = best["grad_accum_steps"] * best["micro_step_seconds"] + best["optimizer_seconds"]
    assert best["step_seconds"] == pytest.approx(steps)
    tokens = request["batch_size"] * request["model"]["seq_length"]
    assert best["tokens_per_second"] == best["composed_tokens_per_second"] == pytest.approx(tokens / steps)
    assert sum(size for name, size in best["memory"].items()) == best["measured_peak_bytes"]
    assert best["measured_peak_bytes"] < best["predicted_peak_bytes"] < best["required_bytes"] < 8 << 30
    assert best["memory_limit_bytes"] == 8 << 30
    events = examples.EVENTS["items"]
    assert [event["seq"] for event in events] == [1, shown["last_seq"]]
    assert examples.RUN_REPORT["report"]["micro_batch_size"] == candidate["micro_batch_size"]
    assert examples.EVENT_STREAM.count("\n\n") == examples.LOG.count("\n") == len(events)
    compared = examples.COMPARISON
    a, b = (compared[side]["tokens_per_second"] for side in "ab")
    assert (a, b / a) == (best["tokens_per_second"], pytest.approx(compared["speedup"]))
    assert compared["speedup_90_percent"][0] < compared["speedup"] < compared["speedup_90_percent"][1]


def test_the_schema_accepts_what_the_service_accepts(client: TestClient) -> None:
    schema = client.get("/v1/schema").json()
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(examples.REQUEST)
    assert not validator.is_valid(examples.REQUEST | {"colour": "red"})
    assert not validator.is_valid(examples.REQUEST | {"batch_size": 0})


def test_no_page_loads_anything_from_elsewhere(client: TestClient) -> None:
    assert client.get("/redoc").status_code == 404
    assert "connect-src 'self'" in client.get("/docs").headers["Content-Security-Policy"]
