"""One answer has the same figures wherever it is told: in JSON, rows, events, texts, exports, the page and Python."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import bexp as python
from bexp.api.stored import StoredExplorations
from bexp.explorer.model.amounts import bytes_text, rate_text
from bexp.explorer.records.event import EventCode, recommendation_event, render_message
from bexp.explorer.records.recommendation import Recommendation
from bexp.storage.queue import Queue
from tests.api.cli.conftest import Run
from tests.api.cli.explored import TABLES, explored, replayed
from tests.contracts.jobs import recommendation_rows

SMALL = {"micro_batch_size": [1, 2, 4, 8], "attention_backends": None}
SIMULATED: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"batch_size": 12}),
    (3, {"batch_size": 13, "prefer": "memory", "tolerance": 0.05}),
    (4, {"bta": {"enable": True}}),
    (5, {"verify": False}),
    (6, {"budget": {"max_trials": 3, "confidence_target": 99}}),
    (7, {"num_query_groups": [4, 2]}),
]
RECORDED = [("gpt2-124m", 1), ("gpt2-124m", 2), ("qwen3-8-layers", 3), ("cerebras-gpt-24gib", 4)]


def check(bexp: Run, queue: Queue, job_id: str) -> None:
    document = json.loads(bexp("best", job_id, "--json").stdout)
    answered = document["answer"]["variants"][0]["recommendation"]
    assert document["recommendation"] == answered
    best = Recommendation.model_validate(answered)
    told = best.figures
    size, ratio = best.candidate.micro_batch_size, f"{best.performance:.2f}x"
    rate, peak = rate_text(best.expected_tokens_per_second), bytes_text(best.expected_peak_bytes)

    row = recommendation_rows(queue.database, job_id)[-1]
    assert (row.micro_batch_size, row.performance, row.tokens_per_second, row.confidence, row.peak_bytes) == told
    of_candidate = best.candidate.model_dump(mode="json", exclude_none=True)
    assert row.candidate == of_candidate
    (listed,) = json.loads(bexp("list", "--json").stdout)
    assert all(listed[name] == value for name, value in best.figures._asdict().items() if name in listed)

    events = StoredExplorations(queue.database).stored_events(job_id)
    assert events[-1].data["answer"]["variants"][0]["recommendation"] == answered
    assert f"{best.candidate.describe()}: {rate}, {ratio} base, confidence {best.confidence}" in events[-1].message
    of_main = [
        event.message
        for event in events
        if event.code is EventCode.RECOMMENDATION
        and event.data["recommendation"]["candidate"]["num_query_groups"] == best.candidate.num_query_groups
    ]
    assert of_main[-1] == render_message(recommendation_event(best)), "the last line is that of the answer"

    six, whole = (" ".join(bexp(*command).stdout.split()) for command in (("watch", job_id), ("best", job_id, "-v")))
    assert f"Recommended micro_batch_size: {size} for" in six
    for text in (six, whole):
        assert f"{rate} per device" in text
        assert f"memory {peak} at the peak" in text
        over = f"per device, {ratio} micro_batch_size {best.base.micro_batch_size}"
        assert best.candidate == best.base or over in text
        assert f"confidence {best.confidence} out of 100" in text
    assert int(bexp("best", job_id).stdout) == size

    taken = best.for_batch
    header = bexp("best", job_id, "--format", "python").stdout
    assert f"measured candidate: {taken.candidate.describe()}" in header
    setup = python.RecommendedSetup.read(document)
    assert setup.micro_batch_size == taken.candidate.micro_batch_size
    assert (setup.tokens_per_second, setup.peak_bytes) == (taken.expected_tokens_per_second, taken.expected_peak_bytes)
    assert bexp("report", job_id, "--out", "report.html").code == 0
    page = re.findall(r'id="report">(.*?)</script>', Path("report.html").read_text(), re.DOTALL)[0]
    assert json.loads(page)["exploration"]["recommendation"] == answered
    assert json.loads(page)["exploration"]["text"] == document["text"]
    for each in document["text"]["rows"]:
        said = " ".join(f"{each['label']} {each['text']}".split())
        assert (said in six) == (each["importance"] in {"main", "brief"}), said
        assert (said in whole) == (each["importance"] != "brief"), said

    ran = {
        trial.candidate for trial in StoredExplorations(queue.database).trials(job_id) if trial.measurement.whole_model
    }
    for other in best.alternatives:
        if other.candidate == best.candidate:
            assert other.tokens_per_second == best.expected_tokens_per_second
            assert other.expected_peak_bytes == best.expected_peak_bytes
        elif best.candidate in ran and other.candidate not in ran:
            assert other.tokens_per_second <= best.expected_tokens_per_second


@pytest.mark.parametrize(("seed", "changes"), SIMULATED)
@pytest.mark.parametrize("bexp", ["database"], indirect=True)
def test_an_answer_of_a_simulated_device_is_one(
    bexp: Run, queue: Queue, tmp_path: Path, seed: int, changes: dict[str, Any]
) -> None:
    check(bexp, queue, explored(queue, tmp_path, seed, **{**SMALL, **changes}))


@pytest.mark.parametrize(("table", "seed"), RECORDED)
@pytest.mark.parametrize("bexp", ["database"], indirect=True)
def test_an_answer_of_a_recorded_device_is_one(bexp: Run, queue: Queue, table: str, seed: int) -> None:
    check(bexp, queue, replayed(queue, TABLES / f"{table}.jsonl", seed=seed))
