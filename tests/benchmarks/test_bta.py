from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bta
from benchmarks.continuation import begin
from benchmarks.docs.results import load
from benchmarks.environment import write_results
from bexp.explorer.cost_model.components import ComponentKind
from bexp.explorer.records.measurement import ComponentMeasurement, Measurement, Outcome
from bexp.explorer.records.trial import TrialPlan
from bexp.explorer.spec.hardware import DeviceReport, HardwareSpec
from bexp.explorer.spec.request import ExplorationRequest
from tests.explorer.simulator import SimulatedDevice, report


class Device:
    """A profiler of a simulated device, on which a second passes with every model."""

    clock = 0.0
    measured: list[str]
    broken: str | None = None
    end_after: int | None = None

    def __init__(self, device: str) -> None:
        assert device == "simulated"
        self._models: list[str] = []

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def hardware(self) -> HardwareSpec:
        return report().hardware

    def begin(self, request: ExplorationRequest) -> DeviceReport:
        self._device = SimulatedDevice(request)
        return report(experts=request.model.moe is not None)

    def measure(self, plan: TrialPlan) -> Measurement:
        if not self._models or self._models[-1] != plan.model.name:
            if len(self._models) == self.end_after:
                raise KeyboardInterrupt
            self._models.append(plan.model.name)
            Device.clock += 1.0
        key = plan.components[0].key
        self.measured.append(f"{plan.model.name} {key}")
        if self.broken and self.broken in key:
            return Measurement(candidate=plan.candidate, outcome=Outcome.CRASHED, reason="illegal memory access")
        return self._device(plan)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> type[Device]:
    monkeypatch.setattr(bta, "Profiler", Device)
    monkeypatch.setattr(Device, "measured", [], raising=False)
    monkeypatch.setattr(Device, "clock", 0.0)
    monkeypatch.setattr("benchmarks.bta.time.monotonic", lambda: Device.clock)
    return Device


def _run(out: Path, *more: str) -> dict[str, Any]:
    sizes = ["--num-experts", "4", "8", "--top-k", "1", "2", "--max-micro-batch-size", "2", "--num-layers", "2"]
    assert bta.main(["--device", "simulated", "--out", str(out), *sizes, *more]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def _models(found: dict[str, Any]) -> list[tuple[int | None, int]]:
    return [(row["num_experts"], row["top_k"]) for row in found["rows"]]


FEW = ("--num-experts", "4", "--top-k", "1")
ALL = [(None, 1), (4, 1), (8, 1), (None, 2), (4, 2), (8, 2)]


def test_a_table_is_completed_by_starting_again(
    tmp_path: Path, device: type[Device], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bta.json"
    first = _run(out, "--seconds", "3.5")
    assert _models(first) == ALL[:4]
    assert first["left_out"] == [{"num_experts": 4, "top_k": 2}, {"num_experts": 8, "top_k": 2}]
    said = capsys.readouterr().out
    assert "2 of 4 models, left out for want of time: E=4 top_k=2, E=8 top_k=2" in said
    assert "kept" not in said

    before = set(device.measured)
    device.measured.clear()
    second = _run(out, "--seconds", "0.5")
    assert _models(second) == ALL[:5]
    assert second["rows"][:4] == first["rows"]
    assert {name.split()[0] for name in device.measured} == {"moe-e4-k2"}
    assert "2 of 4 models are kept" in capsys.readouterr().out
    shared = {row["component"]["kind"] for row in first["shared"]}
    assert shared == {"attention", "embedding", "head"}
    assert not {"attention", "embedding", "head"} & {key.split()[1].split("(")[0] for key in device.measured}
    assert before

    third = _run(out)
    assert _models(third) == ALL
    assert third["left_out"] == []
    assert len(third["continued"]) == 2
    assert third["environment"] == first["environment"]
    assert "4 of 4 models\n" in capsys.readouterr().out

    device.measured.clear()
    assert _run(out) == third
    assert not device.measured


def test_a_continued_model_is_relative_to_the_dense_one_that_is_kept(tmp_path: Path, device: type[Device]) -> None:
    out = tmp_path / "bta.json"
    first = _run(out, "--seconds", "0.5")
    assert _models(first) == ALL[:1]
    for found in first["rows"][0]["best"].values():
        found["tokens_per_second"] *= 2
    write_results(out, first)
    for row in _run(out, "--seconds", "0.5")["rows"][1:]:
        for key, relative in row["relative_to_dense"].items():
            dense = first["rows"][0]["best"][key]["tokens_per_second"]
            assert relative == row["best"][key]["tokens_per_second"] / dense


@pytest.mark.usefixtures("device")
def test_a_run_that_is_killed_leaves_its_models_and_names_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "bta.json"
    monkeypatch.setattr(Device, "end_after", 2)
    with pytest.raises(KeyboardInterrupt):
        _run(out)
    found = json.loads(out.read_text())
    assert _models(found) == ALL[:2]
    assert [tuple(model.values()) for model in found["left_out"]] == [(8, 1), (4, 2), (8, 2)]
    monkeypatch.setattr(Device, "end_after", None)
    assert _models(_run(out)) == ALL


def test_what_models_share_is_saved_before_the_first_is_done(
    tmp_path: Path, device: type[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "bta.json"
    measure = device.measure

    def killed(self: Device, plan: TrialPlan) -> Measurement:
        if plan.components[0].kind is ComponentKind.DENSE_FFN:
            raise KeyboardInterrupt
        return measure(self, plan)

    monkeypatch.setattr(device, "measure", killed)
    with pytest.raises(KeyboardInterrupt):
        _run(out, *FEW)
    found = json.loads(out.read_text())
    assert not found["rows"]
    assert found["shared"]
    monkeypatch.setattr(device, "measure", measure)
    device.measured.clear()
    assert _models(_run(out, *FEW)) == ALL[:2]
    saved = {ComponentMeasurement.model_validate(each).component.key for each in found["shared"]}
    assert not saved & {key.split(maxsplit=1)[1] for key in device.measured}


@pytest.mark.usefixtures("device")
def test_a_component_that_fails_is_recorded_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "broken", "moe_ffn")
    found = _run(tmp_path / "bta.json", "--seconds", "1.5")
    dense, sparse = found["rows"]
    assert not dense["failed"]
    assert set(sparse["failed"].values()) == {"crashed: illegal memory access"}
    assert not any(sparse["best"].values())


def test_another_attention_back_end_costs_only_the_attention(tmp_path: Path, device: type[Device]) -> None:
    first = _run(tmp_path / "bta.json", "--attention", "cudnn", *FEW)
    device.measured.clear()
    second = _run(tmp_path / "efficient.json", "--attention", "efficient", "--reuse", str(tmp_path / "bta.json"), *FEW)
    assert {key.split()[1].split("(")[0] for key in device.measured} == {"attention"}
    assert _models(second) == ALL[:2]
    assert second["reused"]["file"] == "bta.json"
    for before, after in zip(first["rows"], second["rows"], strict=True):
        assert before["components"] == after["components"]
        assert before["best"]["40GiB/plain"]["candidate"]["attention_backend"] == "cudnn"
        assert after["best"]["40GiB/plain"]["candidate"]["attention_backend"] == "efficient"


@pytest.mark.usefixtures("device")
def test_a_table_of_another_shape_is_not_reused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run(tmp_path / "bta.json", "--seconds", "0.5")
    with pytest.raises(SystemExit):
        _run(tmp_path / "math.json", "--hidden-size", "1024", "--reuse", str(tmp_path / "bta.json"))
    assert "shape.hidden_size 2048 instead of 1024" in capsys.readouterr().err


@pytest.mark.usefixtures("device")
def test_other_options_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bta.json"
    first = _run(out, "--seconds", "0.5")
    with pytest.raises(SystemExit):
        _run(out, "--hidden-size", "1024")
    assert "shape.hidden_size 2048 instead of 1024" in capsys.readouterr().err
    assert json.loads(out.read_text()) == first


def test_the_recorded_table_can_be_continued(tmp_path: Path) -> None:
    recorded = load("h200-bta")
    out = tmp_path / "bta.json"
    write_results(out, recorded)
    fresh = {name: recorded[name] for name in ("environment", "hardware", "shape")} | {"rows": [], "shared": []}
    found = begin(out, fresh, same=("shape",))
    options = argparse.Namespace(**recorded["shape"])
    bench = bta.Bench(options, Device("simulated"), found)  # type: ignore[arg-type]  # a stand-in
    assert bench.rows == recorded["rows"]
    asked = {(n, k) for k in options.top_k for n in (None, *options.num_experts)}
    assert set(bench.missing()) == asked - set(_models(recorded))
