"""The steps of a profiler's start, as a benchmark takes them."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import start
from tests.workers.targets.transformers.targets import LLAMA


def test_each_step_of_a_start_has_its_seconds_and_what_took_longest_in_it(tmp_path: Path) -> None:
    config, out = tmp_path / "config.json", tmp_path / "out.json"
    config.write_text(json.dumps(LLAMA))
    assert start.main([str(config), "--device", "cpu", "--seq-length", "16", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["refusal"] is None
    assert [row["step"] for row in found["steps"]][-1] == "report"
    assert all(row["seconds"] >= 0.0 and row["cpu_seconds"] >= 0.0 for row in found["steps"])
    longest = found["steps"][-1]["longest"]
    assert "bexp.workers.targets.transformers.target.TransformersTarget.report" in longest
    assert max(longest.values()) <= found["steps"][-1]["seconds"]
