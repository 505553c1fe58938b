from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.recomputation import candidates, compose, experts_of, main, measure
from bexp.explorer.cost_model.candidate_table import SpaceTable
from bexp.explorer.cost_model.components import Component
from bexp.explorer.records.measurement import ComponentMeasurement, Measurement, Outcome
from bexp.explorer.records.trial import TrialPlan
from bexp.explorer.spec.request import ExplorationRequest
from tests.explorer.simulator import SimulatedDevice, report
from tests.forked_profilers import forked_profilers

MODEL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "vocab_size": 1024,
    "seq_length": 2048,
    "moe": {"num_experts": 8, "top_k": 2, "expert_ffn_hidden_size": 1024},
}
REQUEST = ExplorationRequest.model_validate({"model": MODEL})
OUTPUT = 4 * 2048 * 1024 * 2


def rows_of(device: SimulatedDevice, broken: str = "") -> list[dict[str, Any]]:
    """The table on a device on which components with `broken` in their key crash."""

    def run(plan: TrialPlan) -> Measurement:
        if broken and broken in plan.components[0].key:
            return Measurement(candidate=plan.candidate, outcome=Outcome.CRASHED, reason="illegal memory access")
        return device(plan)

    table = SpaceTable(candidates(REQUEST, 4, [1, 3], "cudnn", "grouped_mm"), REQUEST.model, REQUEST)
    measured: dict[Component, ComponentMeasurement] = {}
    failed: dict[Component, str] = {}
    measure(table, run, measured, failed)
    return compose(table, measured, failed)


def label(row: dict[str, Any]) -> tuple[str, int | None]:
    return row["candidate"]["recompute"], row["candidate"]["bta_tile"]


def test_rows_are_relative_to_the_plain_step() -> None:
    rows = {label(row): row for row in rows_of(SimulatedDevice(REQUEST, noise=0.0, activations=1.0))}
    assert {tile for _, tile in rows} == {None, 1}, "3 does not divide the micro-batch"
    plain = rows["none", None]
    assert plain["step_cost"] == 0
    assert plain["bytes_share"] == 1
    assert rows["full", None]["layer_bytes"] == OUTPUT
    half = rows["partial_50", None]["layer_bytes"]
    assert half == pytest.approx((plain["layer_bytes"] + OUTPUT) / 2)
    shares = [rows[policy, None]["bytes_share"] for policy in ("none", "activations", "experts", "projections", "full")]
    assert shares == sorted(shares, reverse=True)
    assert 0 < rows["activations", None]["step_cost"] < rows["projections", None]["step_cost"]


def test_no_component_is_measured_twice_and_the_optimizer_not_at_all() -> None:
    device = SimulatedDevice(REQUEST)
    rows_of(device)
    keys = [component.key for plan in device.plans for component in plan.components]
    assert len(keys) == len(set(keys))
    assert not any(key.startswith("optimizer") for key in keys)


def test_what_fails_is_said_and_the_rest_stands() -> None:
    rows = {label(row): row for row in rows_of(SimulatedDevice(REQUEST), broken="recompute=projections")}
    assert rows["qkv", None]["reason"] == "crashed: illegal memory access"
    assert "step_cost" in rows["activations", None]
    nothing = rows_of(SimulatedDevice(REQUEST), broken="head")
    assert all("reason" in row for row in nothing)


def test_back_ends_that_do_not_serve_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert experts_of(REQUEST, report(), None) == ["grouped_mm"]
    assert experts_of(REQUEST, report(), ["bmm", "fused"]) == ["bmm"]
    assert "fused: there is no back end of this name" in capsys.readouterr().out


@pytest.mark.slow(together="forked")
def test_a_run_on_the_host(tmp_path: Path) -> None:
    config, out = tmp_path / "small.yaml", tmp_path / "found.json"
    model = {**MODEL, "num_layers": 2, "hidden_size": 64, "seq_length": 64, "dtype": "float32"}
    model["moe"] = {"num_experts": 4, "top_k": 2, "expert_ffn_hidden_size": 64}
    config.write_text(json.dumps({"model": model}))
    with forked_profilers():
        assert main([str(config), "--device", "cpu", "--micro-batch-size", "2", "--tiles", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    rows = {label(row): row for row in found["rows"]}
    assert found["hardware"]["device_kind"] == "cpu"
    assert rows["projections", None]["bytes_share"] < rows["activations", None]["bytes_share"] < 1
    assert len(found["components"]) == 2 + 5 + 4  # embedding and head, attention, experts
