from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.attention_choice import main, pick, request_of, summary, time_back_ends, verdict
from bexp.explorer.cost_model.components import ComponentKind
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import ComponentMeasurement, Measurement, Outcome
from bexp.explorer.records.trial import TrialTask
from bexp.explorer.spec.hardware import BackendSupport, HardwareSpec, SoftwareVersions
from bexp.explorer.spec.model import DType
from bexp.measure.turns import TurnsBudget
from tests.forked_profilers import forked_profilers

CPU = torch.device("cpu")
REPORT = DeviceReport(
    hardware=HardwareSpec(
        device_kind="cpu",
        device_name="test",
        memory_bytes=1 << 40,
        memory_limit_bytes=1 << 40,
        matmul_flops_per_second=dict.fromkeys(DType, 1e12),
        memory_bandwidth_bytes_per_second=1e11,
        launch_seconds=1e-6,
        versions=SoftwareVersions(python="3", torch="2"),
    ),
    attention_backends=tuple(BackendSupport(name=name, usable=True) for name in ("flash", "efficient", "math")),
    default_attention="flash",
)
CELL = {"seq_length": 64, "head_size": 16, "num_heads": 2, "query_groups": 1, "micro_batch_size": 1}


class Device:
    """Stands for a profiler: attention takes what it is told, everything else next to nothing."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self.measured: list[str] = []

    def __call__(self, task: TrialTask) -> Measurement:
        self.measured += [component.key for component in task.components]
        measured = []
        for component in task.components:
            seconds = 1e-4
            if component.kind is ComponentKind.ATTENTION:
                assert component.attention is not None
                seconds = self.seconds[component.attention]
            measured.append(
                ComponentMeasurement(
                    component=component,
                    device_seconds=seconds,
                    host_seconds=1e-5,
                    forward_device_seconds=seconds / 3,
                    standard_error_seconds=1e-6,
                    repeats=5,
                    saved_bytes=1 << 20,
                    forward_peak_bytes=1 << 20,
                    backward_peak_bytes=1 << 20,
                )
            )
        return Measurement(candidate=task.candidate, outcome=Outcome.OK, components=tuple(measured))


@pytest.mark.parametrize("fastest", ["flash", "efficient", "math"])
def test_the_pick_is_the_explorers_and_follows_its_trials(fastest: str) -> None:
    device = Device({name: 0.010 if name == fastest else 0.011 for name in ("flash", "efficient", "math")})
    found = pick(request_of(CELL), REPORT, device)
    assert found["picked"] == fastest
    assert found["confidence"] > 50
    assert {trial["back_end"] for trial in found["trials"]} == {"flash", "efficient", "math"}


def test_a_failure_is_handed_on() -> None:
    def fail(task: TrialTask) -> Measurement:
        return Measurement(candidate=task.candidate, outcome=Outcome.CRASHED, reason="no")

    found = pick(request_of(CELL), REPORT, fail)
    assert found["picked"] is None
    assert {trial["outcome"] for trial in found["trials"]} == {"crashed"}


def test_every_back_end_has_a_time_or_a_reason() -> None:
    found = time_back_ends(request_of(CELL), ["flash", "cudnn", "math"], CPU, TurnsBudget(rounds=2, chain_seconds=0))
    assert found["cudnn"] == {"reason": "cuDNN attention needs a CUDA device, not cpu"}
    assert found["flash"]["seconds"] > 0
    assert found["math"]["seconds"] > 0


def test_the_pick_is_judged_by_the_independent_timing() -> None:
    timed: dict[str, dict[str, Any]] = {
        "flash": {"seconds": 1.0},
        "cudnn": {"seconds": 1.009},
        "efficient": {"seconds": 1.02},
        "math": {"reason": ""},
    }
    verdicts = {name: verdict(name, timed) for name in timed}
    assert verdicts["cudnn"] == {"best": "flash", "ratio": 1.009, "within": True}
    assert verdicts["efficient"] == {"best": "flash", "ratio": 1.02, "within": False}
    assert verdicts["math"] == verdict(None, timed) == {"best": "flash", "ratio": None, "within": False}
    assert verdict("flash", {"flash": {"reason": "no"}})["best"] is None
    cells = [{"verdict": {"block": each}} for each in verdicts.values()]
    assert summary(cells) == {"within": 2, "worst_ratio": 1.02}


@pytest.mark.slow(together="forked")
def test_the_table_is_made(tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    sizes = ["--tokens", "128", "--num-heads", "2", "--head-sizes", "16", "--seq-lengths", "64"]
    with forked_profilers():
        assert main(["--device", "cpu", *sizes, "--seconds", "590", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert not found["left_out"]
    assert found["hardware"]["device_kind"] == "cpu"
    assert [cell["kind"] for cell in found["cells"]] == ["MHA", "GQA", "MQA"]
    for cell in found["cells"]:
        assert cell["picked"] in {"flash", "math"}
        assert cell["verdict"]["block"]["ratio"] >= 1
        assert {trial["outcome"] for trial in cell["trials"]} == {"ok"}
