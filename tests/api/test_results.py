"""What an exploration recommends, how it compares with others, and what real runs with it reached."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from bexp.api import comparison
from bexp.api import stored as api_stored
from bexp.api.comparison import compare_answers
from bexp.api.examples import RUN_REPORT
from bexp.explorer.exports.exploration import ExportSource
from bexp.explorer.records.measurement import Outcome
from bexp.explorer.records.recommendation import Answer, Recommendation, VariantAnswer
from bexp.explorer.records.trial import Trial
from bexp.explorer.trainers.document import ExportError
from bexp.storage.jobs import Job, JobState
from bexp.storage.leases import Lease
from bexp.storage.pruning import delete_job
from bexp.storage.queue import Queue
from tests.api.problems import assert_problem
from tests.contracts.jobs import claim_one
from tests.contracts.samples import make_progress, make_recommendation, make_report, make_request, make_trial
from tests.contracts.test_reuse import add_worker, measure


def variant(recommendation: Recommendation | None, reason: str | None = None) -> VariantAnswer:
    return VariantAnswer(num_query_groups=4, num_parameters=1, recommendation=recommendation, reason=reason)


def test_the_recommendation_is_provisional_until_the_end(client: TestClient, queue: Queue, lease: Lease) -> None:
    path = f"/v1/explorations/{lease.job_id}/recommendation"
    nothing = client.get(path)
    assert_problem(nothing, 404)
    assert nothing.json()["type"] == "urn:bexp:problem:no-recommendation"
    queue.record(lease, make_progress(0))
    found = client.get(path).json()
    assert (found["state"], found["final"], found["answer"]) == ("running", False, None)
    assert (found["target"], found["target_version"], found["allocator"]) == ("bexp", None, "default")
    assert Recommendation.model_validate(found["recommendation"]) == make_recommendation(1)

    answer = Answer(variants=(variant(make_recommendation(8)), variant(make_recommendation(4))), timings={"timed": 1.0})
    queue.finish(lease, JobState.SUCCEEDED, answer=answer)
    found = client.get(path).json()
    assert (found["state"], found["final"]) == ("succeeded", True)
    assert found["recommendation"]["candidate"]["micro_batch_size"] == 8
    assert Answer.model_validate(found["answer"]) == answer


def test_two_answers_are_compared_once_both_are_there(client: TestClient, queue: Queue, lease: Lease) -> None:
    other = queue.enqueue(make_request(batch_size=64))[0].id
    path = f"/v1/explorations/{lease.job_id}/comparison"
    queue.record(lease, make_progress(0))
    refused = client.get(path, params={"other": other})
    assert_problem(refused, 409)
    assert refused.json()["detail"] == f"exploration {other} has no recommendation yet."
    assert_problem(client.get(path, params={"other": "unknown"}), 404)
    assert_problem(client.get(path, params={"other": "no id"}), 422)
    second = claim_one(queue, "b").lease
    queue.pin(second, make_report())
    queue.record(second, make_progress(0))
    found = client.get(path, params={"other": other}).json()
    assert (found["probability_b_faster"], found["differences"]) == (0.5, ["batch_size: None in A, 64 in B"])
    assert [found[side]["explorations"] for side in "ab"] == [[lease.job_id], [other]]


def test_an_exploration_that_is_deleted_before_it_is_compared_is_unknown(
    client: TestClient, queue: Queue, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = queue.enqueue(make_request(batch_size=64))[0].id
    client.post(f"/v1/explorations/{gone}/cancel")

    def compare_later(*given: Any) -> Any:
        delete_job(queue.database, gone)
        return compare_answers(*given)

    monkeypatch.setattr(comparison, "compare_answers", compare_later)
    assert_problem(client.get(f"/v1/explorations/{lease.job_id}/comparison", params={"other": gone}), 404)


def test_an_answer_is_exported_for_a_training_framework(client: TestClient, queue: Queue, lease: Lease) -> None:
    path = f"/v1/explorations/{lease.job_id}/recommendation"
    assert_problem(client.get(path, params={"format": "megatron"}), 409)
    assert client.get(path, params={"format": "megatron"}).json()["detail"] == (
        "The exploration has nothing to recommend yet."
    )
    queue.record(lease, make_progress(0))
    unknown = client.get(path, params={"format": "toml"})
    assert_problem(unknown, 422)
    assert "the formats are python, transformers, trl, accelerate" in unknown.json()["detail"]

    megatron = client.get(path, params={"format": "megatron"})
    assert megatron.headers["content-type"] == "text/x-shellscript; charset=utf-8"
    assert megatron.headers["content-disposition"] == 'inline; filename="bexp-megatron.sh"'
    assert "bexp-export-note" not in megatron.headers
    assert "  --micro-batch-size 1\n" in megatron.text
    assert "# provisional: " in megatron.text
    transformers = client.get(path, params={"format": "transformers"})
    assert "gradient_accumulation_steps" not in transformers.json(), "no batch is stated"
    notes = transformers.headers.get_list("bexp-export-note")
    assert any(note.startswith("measured: target bexp on A device") for note in notes)

    queue.finish(lease, JobState.SUCCEEDED, answer=Answer(variants=(variant(None, "needs 2 GiB of 1 GiB"),)))
    nothing = client.get(path, params={"format": "transformers"})
    assert_problem(nothing, 409)
    assert nothing.json()["detail"] == "Nothing fits: needs 2 GiB of 1 GiB"


def test_a_reused_answer_is_exported_from_the_trials_that_it_was_found_in(
    client: TestClient, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported: list[ExportSource] = []

    def export(_: str, found: ExportSource) -> None:
        exported.append(found)
        raise ExportError("nothing")

    monkeypatch.setattr(api_stored, "export", export)
    first = measure(queue)
    add_worker(queue.database)
    second, _ = queue.enqueue(make_request())
    assert second.reused_from == first.id
    for job in (first, second):
        client.get(f"/v1/explorations/{job.id}/recommendation", params={"format": "megatron"})
    assert [[trial.number for trial in found.trials] for found in exported] == [[0], [0]]


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.FAILED])
def test_an_end_is_final_with_what_was_found_or_why_nothing_was(
    client: TestClient, queue: Queue, lease: Lease, state: JobState
) -> None:
    path = f"/v1/explorations/{lease.job_id}/recommendation"
    if state is JobState.FAILED:
        queue.record(lease, make_progress(0))
        queue.finish(lease, state, error="the device is gone")
        assert client.get(f"/v1/explorations/{lease.job_id}").json()["error"] == "the device is gone"
        assert client.get(path).json()["recommendation"]["candidate"]["micro_batch_size"] == 1
    else:
        queue.finish(lease, state, answer=Answer(variants=(variant(None, "needs 2 GiB of 1 GiB"),)))
        assert client.get(path).json()["answer"]["variants"][0]["reason"] == "needs 2 GiB of 1 GiB"
    assert (client.get(path).json()["state"], client.get(path).json()["final"]) == (state, True)


def test_trials_come_in_pages_as_they_were_stored(client: TestClient, queue: Queue, lease: Lease) -> None:
    path = f"/v1/explorations/{lease.job_id}/trials"
    assert client.get(path).json() == {"items": [], "next_cursor": None, "end_cursor": "-1"}
    for number in range(3):
        queue.record(lease, make_progress(number))
    first = client.get(path, params={"limit": 2}).json()
    assert [Trial.model_validate(item) for item in first["items"]] == [make_trial(0), make_trial(1)]
    rest = client.get(path, params={"limit": 2, "cursor": first["next_cursor"]}).json()
    assert [item["number"] for item in rest["items"]] == [2]
    assert rest["items"][0]["measurement"]["outcome"] == Outcome.OK
    assert rest["next_cursor"] is None
    end = {"cursor": rest["end_cursor"]}
    assert client.get(path, params=end).json() == {"items": [], "next_cursor": None, "end_cursor": rest["end_cursor"]}
    assert_problem(client.get(path, params={"cursor": "x"}), 422)
    assert_problem(client.get(path, params={"cursor": "9" * 40}), 422)


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
