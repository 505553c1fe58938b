"""list, delete and workers against a real API."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from bexp.api.cli.results import table_lines
from bexp.explorer.records.event import Progress
from bexp.explorer.records.recommendation import Answer
from bexp.storage.jobs import JobState
from bexp.storage.queue import Queue
from bexp.storage.workers import forget_worker, register_worker
from tests.api.cli.conftest import Run
from tests.api.cli.samples import ANSWER, TINY
from tests.contracts.samples import make_report, make_worker

ROOM = {"memory_bytes": 1 << 34, "memory_limit_bytes": 1 << 33}
REPORT = make_report().model_copy(update={"hardware": make_report().hardware.model_copy(update=ROOM)})


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY | {"seed": 4711}))
    return path


def test_explorations_are_found_by_label_and_deleted_when_they_have_ended(bexp: Run, config: Path) -> None:
    job_id = bexp("submit", config, "--label", "team=search", "--label", "run=x=1", "--fresh").stdout.strip()
    shown = bexp("list", "--label", "team=search", "--state", "queued").stdout
    assert job_id in shown
    assert "run=x=1 team=search" in shown
    (listed,) = json.loads(bexp("list", "--label", "run=x=1", "--model", TINY["model"]["name"], "--json").stdout)
    assert listed["labels"] == {"team": "search", "run": "x=1"}
    assert json.loads(bexp("list", "--label", "team=ads", "--json").stdout) == []
    for command in (["list"], ["submit", config]):
        refused = bexp(*command, "--label", "team")
        assert refused.code == 2
        assert "key=value" in refused.stderr
    refused = bexp("delete", job_id)
    assert refused.code == 2
    assert f"bexp cancel {job_id}" in refused.stderr
    bexp("cancel", job_id)
    assert bexp("delete", job_id[:8]).stderr == f"exploration {job_id} is deleted\n"
    assert bexp("best", job_id).code == 2


def test_workers_are_listed_and_the_same_request_is_answered_from_what_is_stored(
    bexp: Run, queue: Queue, config: Path
) -> None:
    assert "bexp worker" in bexp("workers").stderr
    first = bexp("submit", config).stdout.strip()
    claim = queue.claim(make_worker("w-1", fingerprint=REPORT.hardware.fingerprint))
    assert claim is not None
    info = make_worker("w-1", num_devices=2, fingerprint=REPORT.hardware.fingerprint, devices="cpu")
    register_worker(queue.database, replace(info, memory_limit_bytes=REPORT.hardware.memory_limit_bytes))
    assert re.search(rf"measuring {first} +cpu +2 x A device ", bexp("workers").stdout)
    queue.pin(claim.lease, REPORT)
    (variant,) = ANSWER.variants
    answer = Answer(variants=(variant.model_copy(update={"completed_target": 95}),))
    queue.finish(claim.lease, JobState.SUCCEEDED, last=Progress(recommendation=answer.recommendation, answer=answer))
    (worker,) = json.loads(bexp("workers", "--json").stdout)
    assert (worker["state"], worker["device_name"]) == ("idle", "A device")

    again = bexp("submit", config, "--watch")
    assert again.code == 0
    assert "BEXP110 " in again.stdout
    assert f"Answered from exploration {first}" in again.stdout
    found = bexp("best", "latest")
    assert found.stdout == "4\n"
    assert f"measured by exploration {first}" in found.stderr
    fresh = bexp("submit", config, "--fresh").stdout.strip()
    assert json.loads(bexp("list", "--json", "--limit", "1").stdout)[0]["state"] == "queued"
    queue.request_cancel(fresh)
    forget_worker(queue.database, "w-1")


def test_a_table_that_is_wider_than_the_terminal_keeps_words_whole() -> None:
    head = ("ID", "STATE", "MODEL", "CREATED")
    rows = [("a" * 16, "running", "m" * 34, "2026-11-22 10:00:00"), ("b" * 16, "queued", "n", "team=search run=7 x=1")]
    assert len(list(table_lines(head, rows, None))) == 3
    for width in (80, 60, 20, 10):
        lines = list(table_lines(head, rows, width))
        words = [word for line in lines for word in line.split()]
        assert words == [word for cells in (head, *rows) for cell in cells for word in cell.split()]
        assert all(len(line) <= width or len(line.split()) == 1 for line in lines)
    assert [line[:1] for line in table_lines(head, rows, 80)] == ["I", " ", "a", " ", "b", " "]
