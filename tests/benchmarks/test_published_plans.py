from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

import pytest

from benchmarks import published_plans
from benchmarks.published_plans import PUBLISHED, main, request_of, summarize
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import Measurement, Outcome
from bexp.explorer.records.trial import TrialTask
from bexp.explorer.search.mesh_knowledge import mesh_candidates
from bexp.explorer.spec.request import ExplorationRequest
from tests.explorer.simulator import SimulatedDevice, report

TABLE = json.loads(PUBLISHED.read_text())


@pytest.mark.parametrize("row", TABLE["rows"], ids=lambda row: str(row["name"]))
def test_a_published_row_stands_for_one_candidate_and_uses_every_device(row: dict[str, Any]) -> None:
    request = request_of(row, TABLE)
    (found,) = mesh_candidates(request, report())
    assert found.mesh.num_devices == request.num_devices
    assert found.mesh.schedule == row["request"]["parallelism"].get("schedule")
    assert row["source"] in TABLE["sources"]


class SimulatedProfiler:
    """Takes the place of a profiler; blocks with `broken` in their key run out of memory."""

    broken = "nothing"
    measured = 0

    def __init__(self, device: str) -> None:
        self._device: SimulatedDevice | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self, request: ExplorationRequest) -> DeviceReport:
        self._device = SimulatedDevice(request, noise=0.0)
        return report()

    def measure(self, task: TrialTask) -> Measurement:
        assert self._device is not None
        type(self).measured += 1
        if self.broken in task.components[0].key:
            return Measurement(candidate=task.candidate, outcome=Outcome.OUT_OF_MEMORY, reason="too large")
        return self._device(task)

    def finish_job(self) -> None:
        self._device = None


def test_a_run_goes_on_where_it_failed_and_measures_no_block_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(published_plans, "Profiler", SimulatedProfiler)
    monkeypatch.setattr(SimulatedProfiler, "broken", "head")
    monkeypatch.setattr(SimulatedProfiler, "measured", 0)
    asked = ["--rows", "8b-fsdp8", "8b-fsdp128", "--out", str(tmp_path / "found.json")]
    assert main(asked) == 1
    assert "head(m=2): out_of_memory: too large" in capsys.readouterr().out
    monkeypatch.setattr(SimulatedProfiler, "broken", "nothing")
    assert main(asked) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    keys = [json.dumps(each["component"]) for each in found["components"]]
    assert len(keys) == len(set(keys)) == 9, "embedding, head, optimizer, a layer's blocks with two policies, flash"
    assert SimulatedProfiler.measured == 9 + 2, "the head failed in each row"
    one, other = (found["rows"][name] for name in ("8b-fsdp8", "8b-fsdp128"))
    assert one["error"] == pytest.approx(one["predicted"] / 5762 - 1)
    assert sum(part["share"] for part in one["parts"]) == pytest.approx(1.0)
    assert one["predicted"] != other["predicted"], "exchanges between nodes differ"
    assert found["summary"]["rows"] == 2
    before = one["causes"]["attention_backends"]
    assert before > one["predicted"], "flash attention is slower than the device's default"
    monkeypatch.setattr(published_plans, "Profiler", None)
    assert main([*asked, "--recompose"]) == 0
    again = json.loads((tmp_path / "found.json").read_text())
    assert [again["rows"][name] for name in ("8b-fsdp8", "8b-fsdp128")] == [one, other]
    again["components"] = [each for each in again["components"] if each["component"]["kind"] != "head"]
    (tmp_path / "found.json").write_text(json.dumps(again))
    assert main([*asked, "--recompose"]) == 1
    without = json.loads((tmp_path / "found.json").read_text())
    assert without["rows"]["8b-fsdp8"] == {**one, "kept": "head(m=2) has not been measured"}


def test_a_setting_that_a_source_leaves_open_is_predicted_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published_plans, "Profiler", SimulatedProfiler)
    (asked,) = [row for row in TABLE["rows"] if "unstated" in row]
    row = {**asked, "as_run": {}}
    (tmp_path / "rows.json").write_text(json.dumps({**TABLE, "rows": [row]}))
    assert main(["--published", str(tmp_path / "rows.json"), "--out", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    other = found["rows"][row["name"]]["otherwise"]["recompute"]
    assert other < found["rows"][row["name"]]["predicted"], "layers run again"


def test_only_other_meshes_of_one_table_are_compared() -> None:
    def row(published: float, predicted: float, tensor: int, devices: int = 8) -> dict[str, Any]:
        request = {"num_devices": devices, "batch_size": 8, "parallelism": {"tensor": tensor}}
        values = {"model": "m", "source": "s", "request": request, "error": predicted / published - 1}
        return {**values, "published": published, "predicted": predicted}

    rows = {"a": row(100, 120, 1), "b": row(90, 81, 2), "c": row(80, 90, 4), "d": row(1, 1, 4, 16), "e": row(9, 9, 1)}
    found = summarize({**rows, "f": {"reason": "out of memory"}})
    assert (found["rows"], found["failed"]) == (5, 1)
    assert (found["pairs"], found["pairs_in_order"]) == (5, 4), "b and c are in the wrong order, a and e are one mesh"
    assert found["median_error"] == pytest.approx(0.1)
    assert found["max_error"] == pytest.approx(0.2)
