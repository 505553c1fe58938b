"""The replay of a search that starts from an earlier job's components."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.docs.search import second_job
from benchmarks.replay.__main__ import main
from benchmarks.simulated_tables import write
from tests.workers.replay.samples import recording


def test_a_second_job_needs_less_time_the_more_it_reuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, out = tmp_path / "small.jsonl", tmp_path / "second-job.json"
    write(recording(), table)
    assert main([str(table), "--out", str(out), "--second-job", "--seeds", "2", "--processes", "1"]) == 0
    found = json.loads(out.read_text())
    seconds = {kind: figures["seconds_to_confident"]["mean"] for kind, figures in found["all_tables"].items()}
    assert seconds["same"] < seconds["like"] < seconds["alone"]
    assert found["by_table"]["small"]["same"] == found["all_tables"]["same"]
    assert "to confidence 90" in capsys.readouterr().out
    assert second_job(found).count("\n| ") == 4  # a header, and a line for each kind
