"""The seconds and the answer of a command, as a benchmark notes them."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import default_answers
from tests.workers.targets.transformers.targets import LLAMA


def test_a_command_is_timed_from_its_start_and_a_recorded_run_is_kept(tmp_path: Path) -> None:
    config, out = tmp_path / "tiny.json", tmp_path / "out.json"
    config.write_text(json.dumps(LLAMA))
    asked = [str(config), "--device", "cpu", "--seq-length", "16", "--batch-size", "4", "--out", str(out)]
    assert default_answers.main(asked) == 0
    found = json.loads(out.read_text())
    (run,) = found["runs"]
    assert (run["name"], run["caches"], run["state"], run["rc"]) == ("tiny", "empty", "succeeded", 0)
    seconds = run["seconds_to"]
    assert 0.0 < seconds["queued"] < seconds["started"] < seconds["first_trial"] <= run["seconds"]
    assert any("Recommended micro_batch_size" in line for line in run["printed"])
    assert run["provisional"] is (run["confidence"] < 95)
    assert found["summary"]["empty"]["firm"] == ([] if run["provisional"] else ["tiny"])
    assert default_answers.main(asked) == 0
    assert json.loads(out.read_text())["runs"] == [run]
