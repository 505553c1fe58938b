from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import context_parallel_step
from benchmarks.context_parallel_cells import Setup
from benchmarks.context_parallel_summary import seconds_once_a_step
from bexp.explorer.cost_model.components import ComponentKind
from bexp.explorer.formats.document import load_document
from bexp.explorer.formats.request import parse_request
from bexp.explorer.records.measurement import Measurement, Outcome, PhaseSeconds
from bexp.explorer.records.trial import TrialKind, TrialPlan
from bexp.explorer.spec.hardware import DeviceReport, HardwareSpec
from bexp.explorer.spec.request import ExplorationRequest
from tests.explorer.simulator import SimulatedDevice, report
from tests.forked_profilers import forked_profilers

CONFIG = """
model:
  name: small
  num_layers: 4
  hidden_size: 1024
  ffn_hidden_size: 4096
  num_attention_heads: 16
  vocab_size: 4096
  seq_length: 1024
batch_size: 64
"""
TINY = """
model: {name: tiny, num_layers: 1, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 2, vocab_size: 64,
        seq_length: 64, dtype: float32}
"""


class Device:
    """A group profiler of simulated devices; a second passes with every whole model."""

    clock = 0.0
    memory_gib = 132.0
    plans: list[TrialPlan]
    failing: dict[tuple[str, str], Measurement]
    slow: dict[str, float]

    def __init__(self, devices: list[str], **_: object) -> None:
        self._report = report(memory_gib=self.memory_gib, experts=False, num_devices=len(devices))

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def hardware(self) -> HardwareSpec:
        return self._report.hardware

    def begin(self, request: ExplorationRequest) -> DeviceReport:
        self._device = SimulatedDevice(request)
        self._device.layout_speed = self.slow
        return self._report

    def measure(self, plan: TrialPlan) -> Measurement:
        self.plans.append(plan)
        if plan.kind is TrialKind.COMPONENTS:
            return self._device(plan)
        Device.clock += 1.0
        candidate = plan.candidate
        failure = self.failing.get((candidate.context_parallel_layout or "alone", candidate.recompute))
        return failure.model_copy(update={"candidate": candidate}) if failure else self._device(plan)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> type[Device]:
    monkeypatch.setattr(context_parallel_step, "Profiler", Device)
    monkeypatch.setattr(Device, "plans", [], raising=False)
    monkeypatch.setattr(Device, "failing", {}, raising=False)
    monkeypatch.setattr(Device, "slow", {"ring": 0.5, "zigzag": 0.97}, raising=False)
    monkeypatch.setattr(Device, "clock", 0.0)
    monkeypatch.setattr("benchmarks.context_parallel_step.time.monotonic", lambda: Device.clock)
    return Device


def _run(folder: Path, *more: str, status: int = 0) -> dict[str, Any]:
    config, out = folder / "small.yaml", folder / "found.json"
    config.write_text(CONFIG)
    options = ["--num-devices", "4", "--seq-lengths", "16384", "32768", "--out", str(out), *more]
    assert context_parallel_step.main([str(config), *options]) == status
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def _whole(device: type[Device]) -> list[tuple[int, str]]:
    plans = [plan for plan in device.plans if plan.kind is TrialKind.WHOLE_MODEL]
    return [(plan.model.seq_length, plan.candidate.context_parallel_layout or "alone") for plan in plans]


def _failure(outcome: Outcome, reason: str) -> Measurement:
    candidate = {"micro_batch_size": 1, "attention_backend": "flash", "num_query_groups": 16}
    return Measurement.model_validate({"candidate": candidate, "outcome": outcome, "reason": reason})


def test_layouts_take_turns_and_the_choice_is_the_fastest(
    tmp_path: Path, device: type[Device], capsys: pytest.CaptureFixture[str]
) -> None:
    found = _run(tmp_path)
    forwards = ["ring", "striped", "zigzag"]
    turns = [(length, layout) for length in (16384, 32768) for layout in forwards]
    assert _whole(device)[:6] == turns
    assert _whole(device)[6:] == [(length, layout) for length in (16384, 32768) for layout in reversed(forwards)], (
        "every other round goes backwards"
    )
    for cell in found["cells"]:
        rows = {row["layout"]: row for row in cell["layouts"]}
        assert {row["num_runs"] for row in rows.values()} == {2}
        assert rows["ring"]["speed_over_ring"] == 1
        assert rows["striped"]["speed_over_ring"] == pytest.approx(
            rows["ring"]["step_seconds"] / rows["striped"]["step_seconds"]
        )
        assert rows["striped"]["speed_over_ring"] > 1.1
        # One sequence a step: each of the four devices has a quarter of its tokens.
        for row in rows.values():
            assert row["step_seconds"] == pytest.approx(row["micro_step_seconds"] + row["seconds_once_a_step"])
            assert row["tokens_per_second"] == pytest.approx(cell["seq_length"] / 4 / row["step_seconds"], rel=1e-6)
        assert cell["choice"]["chosen"]["layout"] == "striped"
        assert cell["choice"]["within_tolerance"] is True
        assert cell["choice"]["fastest"]["layout"] == "striped"
    assert found["left_out"] == []
    assert "the explorer chose 4:striped" in capsys.readouterr().out


def test_a_choice_that_is_not_the_fastest_says_by_how_much(
    tmp_path: Path, device: type[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Components say striped, whole models zigzag."""
    measure = Device.measure

    def measured(self: Device, plan: TrialPlan) -> Measurement:
        found = measure(self, plan)
        if found.whole_model is None or plan.candidate.context_parallel_layout != "zigzag":
            return found
        faster = {"micro_step_seconds": 0.5 * found.whole_model.micro_step_seconds}
        return found.model_copy(update={"whole_model": found.whole_model.model_copy(update=faster)})

    monkeypatch.setattr(device, "measure", measured)
    choice = _run(tmp_path, "--rounds", "1")["cells"][0]["choice"]
    assert (choice["chosen"]["layout"], choice["fastest"]["layout"]) == ("striped", "zigzag")
    assert choice["within_tolerance"] is False
    assert 0.4 < choice["share_of_best"] < 0.9


def test_the_optimizer_is_measured_once_for_all_lengths(tmp_path: Path, device: type[Device]) -> None:
    _run(tmp_path, "--rounds", "1")
    kinds = [c.kind for plan in device.plans for c in plan.components]
    assert kinds.count(ComponentKind.OPTIMIZER) == 1
    assert kinds.count(ComponentKind.HEAD) == 2


def test_running_out_of_memory_moves_all_layouts_to_the_next_policy(tmp_path: Path, device: type[Device]) -> None:
    device.failing[("zigzag", "none")] = _failure(Outcome.OUT_OF_MEMORY, "rank 3: out of memory")
    cell = _run(tmp_path, "--rounds", "1", "--seq-lengths", "16384", "--no-search")["cells"][0]
    runs = [(run["layout"], run["recompute"], run["outcome"]) for run in cell["runs"]]
    assert runs == [
        ("ring", "none", "ok"),
        ("striped", "none", "ok"),
        ("zigzag", "none", "out_of_memory"),
        *((layout, "activations", "ok") for layout in ("ring", "striped", "zigzag")),
    ]
    assert cell["runs"][2]["reason"] == "rank 3: out of memory"
    assert [row["layout"] for row in cell["layouts"] if row["recompute"] == "activations"] == [
        "ring",
        "striped",
        "zigzag",
    ]


def test_the_first_policy_is_the_cheapest_that_is_predicted_to_fit(
    tmp_path: Path, device: type[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = ("--seq-lengths", "262144", "--rounds", "1", "--no-search")
    assert {run["recompute"] for run in _run(tmp_path, *lengths)["cells"][0]["runs"]} == {"none"}
    (tmp_path / "found.json").unlink()
    monkeypatch.setattr(device, "memory_gib", 10.0)
    cell = _run(tmp_path, *lengths)["cells"][0]
    assert cell["runs"][0]["recompute"] == cell["policies"]["4"][0] != "none"
    (tmp_path / "found.json").unlink()
    monkeypatch.setattr(device, "memory_gib", 2.0)
    assert _run(tmp_path, *lengths, status=1)["cells"][0]["runs"] == []


def test_a_layout_that_crashes_is_told_and_not_tried_again(
    tmp_path: Path, device: type[Device], capsys: pytest.CaptureFixture[str]
) -> None:
    device.failing[("zigzag", "none")] = _failure(Outcome.CRASHED, "illegal memory access")
    cell = _run(tmp_path, "--seq-lengths", "16384")["cells"][0]
    assert [run["layout"] for run in cell["runs"]].count("zigzag") == 1
    assert {row["layout"] for row in cell["layouts"]} == {"ring", "striped"}
    assert "crashed: illegal memory access" in capsys.readouterr().out


def test_a_run_that_time_cut_short_is_continued(tmp_path: Path, device: type[Device]) -> None:
    first = _run(tmp_path, "--seconds", "4.5", "--search-seconds", "0.1")
    assert _whole(device) == [(16384, "ring"), (16384, "striped"), (16384, "zigzag"), (32768, "ring")]
    assert first["left_out"] == ["S=16384 round 1", "S=32768 round 0", "S=32768 round 1", "S=32768 search"]
    device.plans.clear()
    second = _run(tmp_path)
    assert second["cells"][0]["runs"][:3] == first["cells"][0]["runs"]
    assert len(_whole(device)) == 8
    assert second["left_out"] == []
    assert len(second["continued"]) == 1
    device.plans.clear()
    assert _run(tmp_path)["cells"] == second["cells"]
    assert not device.plans


def test_nothing_is_begun_that_would_end_too_late(
    tmp_path: Path, device: type[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four times the tokens take sixteen times the second that was timed."""
    measure = Device.measure

    def measured(self: Device, plan: TrialPlan) -> Measurement:
        return measure(self, plan).model_copy(update={"phases": PhaseSeconds(build=0.5, timed=1.0)})

    monkeypatch.setattr(device, "measure", measured)
    options = ["--seq-lengths", "16384", "65536", "--rounds", "1", "--no-search"]
    assert _run(tmp_path, *options, "--seconds", "18.5")["left_out"] == ["S=65536 round 0"]
    assert len(_whole(device)) == 3
    assert _run(tmp_path, *options, "--seconds", "19.5")["left_out"] == []


def test_what_is_shorter_is_begun_where_the_longer_one_would_not_end(
    tmp_path: Path, device: type[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of the tokens take a sixteenth of the 200 seconds, or as long as repeats may: 25 seconds."""
    measure = Device.measure

    def measured(self: Device, plan: TrialPlan) -> Measurement:
        timed = 200.0 if plan.model.seq_length == 65536 else 0.0
        Device.clock += timed
        return measure(self, plan).model_copy(update={"phases": PhaseSeconds(timed=timed)})

    monkeypatch.setattr(device, "measure", measured)
    options = ["--seq-lengths", "65536", "16384", "--rounds", "1", "--no-search", "--trial-seconds", "300"]
    assert _run(tmp_path, *options, "--seconds", "628")["left_out"] == ["S=16384 round 0"]
    Device.clock = 0.0
    assert _run(tmp_path, *options, "--seconds", "29")["left_out"] == []


def test_a_search_that_time_does_not_allow_is_left_out(tmp_path: Path, device: type[Device]) -> None:
    found = _run(tmp_path, "--rounds", "1", "--seconds", "20", "--search-seconds", "30")
    assert found["left_out"] == ["S=16384 search", "S=32768 search"]
    assert {cell["choice"] for cell in found["cells"]} == {None}
    assert not [plan for plan in device.plans if plan.components]


def test_communication_that_passes_once_a_step_counts_once() -> None:
    assert seconds_once_a_step({"optimizer_seconds": 2.0}) == 2.0
    assert seconds_once_a_step({"optimizer_seconds": 2.0, "communication_seconds": None}) == 2.0
    assert seconds_once_a_step({"optimizer_seconds": 2.0, "communication_seconds": 0.5}) == 2.5


@pytest.mark.usefixtures("device")
def test_another_setup_does_not_continue_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run(tmp_path, "--rounds", "1", "--no-search")
    with pytest.raises(SystemExit):
        _run(tmp_path, "--num-layers", "2")
    assert "setup.num_layers 4 instead of 2" in capsys.readouterr().err


def test_sizes_are_compared_at_one_batch(tmp_path: Path, device: type[Device]) -> None:
    """Four sequences a step: each device alone has one, all four share each of four in turn."""
    cell = _run(tmp_path, "--seq-lengths", "16384", "--sizes", "1", "2", "4", "--rounds", "1")["cells"][0]
    assert cell["batch_size"] == 4
    rows = {(row["size"], row["layout"]): row for row in cell["layouts"]}
    assert len(rows) == 7
    for (size, _), row in rows.items():
        assert row["step_seconds"] == pytest.approx(size * row["micro_step_seconds"] + row["seconds_once_a_step"])
        assert row["tokens_per_second"] == pytest.approx(16384 / row["step_seconds"])
    assert rows[1, None]["speed_over_ring"] is None
    assert rows[2, "ring"]["speed_over_ring"] == 1
    assert cell["choice"]["share_of_best"] is not None
    assert all(plan.num_processes == 4 for plan in device.plans if plan.kind is TrialKind.WHOLE_MODEL)


@pytest.mark.usefixtures("device")
def test_wrong_usage_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, reason in (
        (("--num-devices", "1"), "shares no sequences"),
        (("--seq-lengths", "16385"), "multiples of 4 tokens"),
        (("--sizes", "3"), "3 does not divide num_devices"),
        (("--attention", "efficient"), "--attention: only cudnn, flash, math serves"),
    ):
        with pytest.raises(SystemExit):
            _run(tmp_path, *options)
        assert reason in capsys.readouterr().err


def test_a_request_varies_nothing_but_sizes_layouts_and_recomputation() -> None:
    base = parse_request(load_document(CONFIG))
    setup = Setup(4, (2, 4), "flash", 3, 30.0, 60.0)
    request = setup.request(base, 4096)
    assert (request.model.seq_length, request.model.num_layers, request.batch_size) == (4096, 3, 2)
    assert request.micro_batch_sizes == (1,)
    assert request.tiles_for(1) == (None,)
    assert [(sharing.size, sharing.layout) for sharing in request.sharings] == [
        (size, layout) for size in (2, 4) for layout in ("ring", "striped", "zigzag")
    ]


@pytest.mark.slow(together="forked")
def test_two_ranks_on_the_cpu(tmp_path: Path) -> None:
    config, out = tmp_path / "tiny.yaml", tmp_path / "found.json"
    config.write_text(TINY)
    options = ["--num-devices", "2", "--device", "cpu", "--seq-lengths", "64", "--rounds", "1", "--out", str(out)]
    with forked_profilers():
        assert context_parallel_step.main([str(config), *options, "--search-seconds", "0.5"]) == 0
    (cell,) = json.loads(out.read_text())["cells"]
    assert {row["layout"] for row in cell["layouts"]} == {"ring", "striped", "zigzag"}
    for row in cell["layouts"]:
        assert row["step_seconds"] > 0
        assert row["peak_bytes"] > 0
    assert cell["choice"]["chosen"]["size"] == 2
    assert cell["choice"]["share_of_best"] <= 1
