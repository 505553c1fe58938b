from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.attention_choice import Cell, SharedMeasure, main, pick, summary, verdict
from benchmarks.attention_timing import MAX_ROUNDS, MIN_ROUNDS, block_pass, core_pass, time_back_ends, time_in_turns
from bexp.explorer.cost_model.components import ComponentKind
from bexp.explorer.records.measurement import ComponentMeasurement, Measurement, Outcome
from bexp.explorer.records.trial import TrialPlan
from bexp.explorer.spec.hardware import BackendSupport, DeviceReport, HardwareSpec, SoftwareVersions
from bexp.explorer.spec.model import DType
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
SHORT, LONG = (Cell(seq_length, 16, 4, 4, 1024) for seq_length in (128, 512))


class Device:
    """Stands for a profiler: attention takes what it is told, everything else next to nothing."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self.measured: list[str] = []

    def __call__(self, plan: TrialPlan) -> Measurement:
        self.measured += [component.key for component in plan.components]
        measured = []
        for component in plan.components:
            seconds = 1e-4
            if component.kind is ComponentKind.ATTENTION:
                assert component.backend is not None
                seconds = self.seconds[component.backend]
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
        return Measurement(candidate=plan.candidate, outcome=Outcome.OK, components=tuple(measured))


def _watch(seconds: Callable[[str], float]) -> tuple[dict[str, Callable[[], None]], Any]:
    """Contenders that leave their names behind, and a stopwatch that gives them these seconds."""
    called: list[str] = []
    runs: dict[str, Callable[[], None]] = {name: partial(called.append, name) for name in ("a", "b", "c")}

    def watch(run: Callable[[], None]) -> Callable[[], float]:
        run()
        found = seconds(called[-1])
        return lambda: found

    return runs, watch


@pytest.mark.parametrize("fastest", ["flash", "efficient", "math"])
def test_the_pick_is_the_explorers_and_follows_its_trials(fastest: str) -> None:
    device = Device({name: 0.010 if name == fastest else 0.011 for name in ("flash", "efficient", "math")})
    found = pick(SHORT.shape(), REPORT, device)
    assert found["picked"] == fastest
    assert found["confidence"] > 50
    assert {trial["back_end"] for trial in found["trials"]} == {"flash", "efficient", "math"}


def test_what_is_not_attention_is_measured_once() -> None:
    device = Device({"flash": 0.01, "efficient": 0.012, "math": 0.02})
    measure = SharedMeasure(device)
    assert pick(SHORT.shape(), REPORT, measure)["picked"] == "flash"
    others = [key for key in device.measured if not key.startswith("attention")]
    assert len(others) == 4
    device.seconds, device.measured = {"flash": 0.03, "efficient": 0.02, "math": 0.04}, []
    assert pick(LONG.shape(), REPORT, measure)["picked"] == "efficient"
    assert device.measured
    assert all(key.startswith("attention(m=2") for key in device.measured)


def test_a_failure_is_handed_on() -> None:
    def fail(plan: TrialPlan) -> Measurement:
        return Measurement(candidate=plan.candidate, outcome=Outcome.CRASHED, reason="no")

    found = pick(SHORT.shape(), REPORT, SharedMeasure(fail))
    assert found["picked"] is None
    assert {trial["outcome"] for trial in found["trials"]} == {"crashed"}


def test_the_slow_leave_and_the_close_stay() -> None:
    runs, watch = _watch({"a": 1.0, "b": 1.005, "c": 1.5}.__getitem__)
    found = time_in_turns(runs, watch, CPU, seconds=60)
    assert {name: run["seconds"] for name, run in found.items()} == {"a": 1.0, "b": 1.005, "c": 1.5}
    assert found["c"]["rounds"] == MIN_ROUNDS < found["a"]["rounds"] == found["b"]["rounds"]
    runs, watch = _watch({"a": 1.0, "b": 1.3, "c": 3.0}.__getitem__)
    found = time_in_turns(runs, watch, CPU, seconds=60)
    assert [found[name]["rounds"] for name in "abc"] == [MIN_ROUNDS, MIN_ROUNDS, 1]


def test_one_that_dropped_out_comes_back_if_the_others_slow_down() -> None:
    first, later = {"a": 1.0, "b": 2.5, "c": 9.0}, {"a": 2.0, "b": 1.0, "c": 9.0}
    runs, watch = _watch(lambda name: first.pop(name, later[name]))
    found = time_in_turns(runs, watch, CPU, seconds=60)
    assert found["b"]["seconds"] == 1.0
    assert found["b"]["rounds"] >= MIN_ROUNDS


def test_a_drift_of_the_device_meets_all_alike() -> None:
    clock = itertools.count()
    runs, watch = _watch(lambda name: (1.0 if name != "b" else 1.02) * (1 + 0.002 * next(clock)))
    found = time_in_turns(runs, watch, CPU, seconds=60)
    assert found["a"]["rounds"] == MAX_ROUNDS
    assert found["b"]["seconds"] / found["a"]["seconds"] == pytest.approx(1.02, abs=0.005)
    assert found["c"]["seconds"] / found["a"]["seconds"] == pytest.approx(1.0, abs=0.005)


def test_memory_that_runs_out_is_an_outcome() -> None:
    def exhaust() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    runs, watch = _watch(lambda _: 1.0)
    runs["b"] = exhaust
    found = time_in_turns(runs, watch, CPU, seconds=0)
    assert found["b"]["outcome"] == "out_of_memory"
    assert found["a"]["outcome"] == found["c"]["outcome"] == "ok"
    assert found["a"]["rounds"] == MIN_ROUNDS
    only = {"b": exhaust}
    assert time_in_turns(only, watch, CPU, seconds=0).keys() == {"b"}


def test_memory_that_runs_out_between_the_others_is_an_outcome() -> None:
    runs, watch = _watch(lambda _: 1.0)
    b, calls = runs["b"], itertools.count()

    def exhaust() -> None:
        b()
        if next(calls) == 4:  # after the warm-up, which runs it three times
            raise torch.OutOfMemoryError("CUDA out of memory.")

    runs["b"] = exhaust
    found = time_in_turns(runs, watch, CPU, seconds=0)
    assert {name: run["outcome"] for name, run in found.items()} == {"a": "ok", "b": "out_of_memory", "c": "ok"}


@pytest.mark.parametrize("build", [block_pass, core_pass])
def test_every_back_end_has_a_line(build: Any) -> None:
    found = time_back_ends(build, Cell(64, 16, 1, 2, 64).shape(), ("flash", "cudnn", "math"), CPU, seconds=0.1)
    assert list(found) == ["flash", "cudnn", "math"]
    assert found["cudnn"] == {"outcome": "unsupported", "reason": "cuDNN attention needs a CUDA device, not cpu"}
    assert found["flash"]["seconds"] > 0
    assert found["math"]["seconds"] > 0


def _timed(**seconds: float) -> dict[str, dict[str, dict[str, Any]]]:
    runs = {name: {"outcome": "ok", "seconds": value} for name, value in seconds.items()}
    return {"block": runs | {"math": {"outcome": "out_of_memory"}}, "core": runs}


def test_the_pick_is_judged_by_the_independent_timing() -> None:
    near = verdict("flash", _timed(flash=1.009, cudnn=1.0))
    far = verdict("flash", _timed(flash=1.02, cudnn=1.0))
    lost = verdict("math", _timed(flash=1.0, cudnn=1.1))
    none = verdict(None, _timed(flash=1.0))
    assert near["verdict"]["block"] == {"best": "cudnn", "ratio": 1.009, "within": True}
    assert far["verdict"]["block"] == {"best": "cudnn", "ratio": 1.02, "within": False}
    for unknown in (lost, none):
        assert unknown["verdict"]["block"] == {"best": "flash", "ratio": None, "within": False}
    found = summary([near, far, lost, none])
    assert found["block"] == {"within": 1, "share_within": 0.25, "worst_ratio": 1.02}
    assert verdict("flash", {"block": {"flash": {"outcome": "crashed"}}})["verdict"]["block"]["best"] is None


def test_the_flops_are_those_of_causal_attention() -> None:
    cell = Cell(4096, 128, 8, 32, 32768)
    assert cell.kind == "GQA"
    assert cell.shape().micro_batch_size == 8
    forward = 2 * 2 * 8 * 32 * 4096**2 * 128 / 2
    assert cell.flops == pytest.approx(3.5 * forward)


@pytest.mark.slow(together="forked")
def test_the_table_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "table.json"
    sizes = ["--tokens", "128", "--num-heads", "2", "--head-sizes", "16", "--seq-lengths", "64"]
    with forked_profilers():
        assert main(["--device", "cpu", *sizes, "--seconds", "590", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert not found["left_out"]
    assert found["hardware"]["device_kind"] == "cpu"
    assert [cell["kind"] for cell in found["cells"]] == ["MHA", "MQA"]
    for cell in found["cells"]:
        assert cell["picked"] in {"flash", "math"}
        assert cell["timed"]["block"][cell["picked"]]["rounds"] >= MIN_ROUNDS or not cell["verdict"]["block"]["within"]
        assert cell["verdict"]["block"]["ratio"] >= 1
        assert {trial["outcome"] for trial in cell["trials"]} == {"ok"}
    assert "'share_within'" in capsys.readouterr().out
