"""A short fuzz of a service, and that its judge sees what is wrong with an answer."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from bexp.api.app import create_app
from bexp.api.settings import ServiceSettings
from tests.chaos import fuzz_answers
from tests.chaos.fuzz import fuzz
from tests.chaos.fuzz_answers import PROBLEM, VALIDATED, Answer, Judge
from tests.chaos.fuzz_changes import Request, Tenant
from tests.chaos.fuzz_requests import JOB, JOBS
from tests.waits import PATIENCE_SECONDS


@pytest.mark.slow
def test_a_service_stands_a_short_fuzz(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ANSWER_SECONDS", "PATIENCE_SECONDS"):  # a busy host takes longer than is promised
        monkeypatch.setattr(fuzz_answers, name, PATIENCE_SECONDS)
    found = fuzz(400, seed=1, seconds=PATIENCE_SECONDS)
    assert found["violations"] == []
    assert found["requests"] >= 400
    # Of the first 200 requests 29 to 40% are accepted, because there are few explorations yet; of 400 it is 47 to 51%.
    assert found["accepted_share"] >= 0.4
    assert {"200", "201", "202", "401", "404", "422"} <= set(found["statuses"])
    assert 0 < found["median_seconds"] <= found["p99_9_seconds"] <= found["slowest_seconds"] * 1.05


RED, BLUE = Tenant("owner-red", {"usual": "a"}), Tenant("owner-blue", {"usual": "b"})
LIST = Request(f"GET {JOBS}", "GET", JOBS, RED)
JSON = {"content-type": "application/json"}
EMPTY = Answer(200, JSON, b'{"items": [], "next_cursor": null}')
MISSING = Answer(404, {"content-type": PROBLEM}, json.dumps({"title": "Not Found", "status": 404}).encode())


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return create_app(ServiceSettings("sqlite://")).openapi()


@pytest.mark.parametrize(
    ("request_", "answer", "fault"),
    [
        (LIST, replace(EMPTY, status=500), "status 500: "),
        (LIST, Answer(0), "no answer"),
        (LIST, replace(EMPTY, seconds=9.0), "an answer took longer"),
        (LIST, MISSING, "status 404 is not declared"),
        (replace(LIST, route=None), EMPTY, "status 200 where there is no route"),
        (replace(LIST, is_refused=True), EMPTY, "it had to be refused"),
        (replace(LIST, expected=frozenset({401})), EMPTY, "not one of [401]"),
        (LIST, replace(MISSING, status=401), "for a valid request"),
        (LIST, replace(EMPTY, headers={"content-type": "text/plain"}), "text/plain is not declared"),
        (LIST, replace(EMPTY, body=b"{"), "no JSON"),
        (LIST, replace(EMPTY, body=b'{"items": [], "next_cursor": 1}'), "$.next_cursor"),
        (LIST, replace(EMPTY, body=b'{"items": ["owner-blue"]}'), "owner-blue is named in the answer to owner-red"),
        (replace(LIST, route=f"GET {JOB}"), replace(MISSING, headers=JSON), "an error is application/json"),
        (replace(LIST, route=f"GET {JOB}"), replace(MISSING, body=b'{"status": 409}'), "a problem says 409"),
        (replace(LIST, raw=b"\0"), EMPTY, "200 for what is no HTTP"),
    ],
)
def test_what_is_wrong_with_an_answer_is_named(
    document: dict[str, Any], request_: Request, answer: Answer, fault: str
) -> None:
    judge = Judge(document, [RED, BLUE])
    told = [text for _ in range(VALIDATED) for text in judge.faults_of(request_, answer)]
    assert any(fault in text for text in told), told
    assert not [text for _ in range(VALIDATED) for text in judge.faults_of(LIST, EMPTY)]
