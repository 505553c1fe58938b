from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import kernels
from benchmarks.gemm_contenders import BASELINES, CHOSEN, COUNTED, OURS, GemmPasses, Operands, Problem, errors, problem
from benchmarks.gemm_summary import summarize
from benchmarks.kernels import DISTRIBUTIONS, K, N, loads, roofline_seconds
from bexp.measure import turns
from bexp.measure.turns import TurnsBudget

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", BASELINES)
def test_a_contender_is_compared_row_by_row(name: str) -> None:
    """Also where it works on padded rows; and a wrong number is seen."""
    given = problem((5, 0, 9, 2), 32, 16, torch.float32, CPU)
    operands = BASELINES[name](given)
    assert max(errors(GemmPasses(operands), given).values()) <= 1e-5
    other = given.w.clone()
    other[2, 3, 4] += 1
    found = errors(GemmPasses(operands), replace(given, w=other))
    assert found["out"] > 1e-2
    assert found["x"] > 1e-2
    assert found["w"] <= 1e-5


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_loads_add_up(distribution: str) -> None:
    counts = loads(distribution, 64, 16)
    assert len(counts) == 64
    assert sum(counts) == 64 * 16
    assert counts == loads(distribution, 64, 16)
    assert (max(counts) > 100) == (distribution == "zipf")


def test_the_roofline_is_bytes_for_few_rows_and_arithmetic_for_many() -> None:
    peak, bandwidth = 700e12, 4e12
    few, many = (16,) * 128, (8192,) * 128
    operands = 16 * 128 * (K + N) + 128 * K * N
    assert roofline_seconds(few, peak, bandwidth) == pytest.approx(3 * 2 * operands / bandwidth)
    assert roofline_seconds(many, peak, bandwidth) == pytest.approx(6 * sum(many) * K * N / peak)
    empty = (16, 0)
    one_read_less = 2 * 2 * K * N / bandwidth
    assert roofline_seconds((8, 8), peak, bandwidth) - roofline_seconds(empty, peak, bandwidth) == pytest.approx(
        one_read_less
    )


def test_summary_takes_the_best_of_each_side() -> None:
    runs = [
        {"name": "loop", "outcome": "ok", "seconds": 4e-3, "host_seconds": 4e-3, "standard_error_seconds": 4e-5},
        {"name": "grouped_mm", "outcome": "ok", "seconds": 3e-3, "host_seconds": 1e-3, "standard_error_seconds": 3e-5},
        {"name": "bmm", "outcome": "out_of_memory"},
        {
            "name": "cublas_grouped",
            "outcome": "ok",
            "seconds": 2e-3,
            "host_seconds": 5e-3,
            "standard_error_seconds": 2e-5,
        },
        {"name": "triton_grouped", "outcome": "wrong"},
    ]
    cell = {"tokens": 512, "roofline_seconds": 1.6e-3, "sustained_roofline_seconds": 1.8e-3, "runs": runs}
    empty = {"tokens": 512, "roofline_seconds": 1e-3, "runs": []}
    found = summarize([cell, empty])
    assert cell["ratio"] == pytest.approx(1.5)
    assert cell["roofline_share"] == pytest.approx(0.8)
    assert cell["ratio_with_host"] == pytest.approx(3 / 5), "the host takes 5 ms to launch ours, and 1 ms for theirs"
    assert cell["verdict"] == "faster"
    assert found["geometric_mean_ratio_with_host"] == pytest.approx(3 / 5)
    assert found["cells"] == 2
    assert found["cells_timed"] == 1
    assert found["geometric_mean_ratio"] == pytest.approx(1.5)
    assert found["roofline_cells"] == 1
    assert found["roofline_cells_reached"] == 0
    assert found["sustained_roofline_cells_reached"] == 1


def test_a_ratio_within_the_standard_error_is_level() -> None:
    theirs = {"name": "loop", "outcome": "ok", "seconds": 1.01, "host_seconds": 1.01, "standard_error_seconds": 0.01}
    ours = {"name": "triton_grouped", "outcome": "ok", "seconds": 1.0, "host_seconds": 0.5, "standard_error_seconds": 0}
    cell = {"tokens": 16, "roofline_seconds": 1e-5, "sustained_roofline_seconds": 1e-5, "runs": [theirs, ours]}
    assert summarize([cell])["verdicts"] == {"faster": 0, "level": 1, "slower": 0}
    theirs["standard_error_seconds"] = 0.001
    assert summarize([cell])["verdicts"] == {"faster": 1, "level": 0, "slower": 0}


def test_auto_is_compared_with_the_best_stock_one_by_the_clock() -> None:
    def run(name: str, seconds: float, clock_seconds: float) -> dict[str, object]:
        return {
            "name": name,
            "outcome": "ok",
            "seconds": seconds,
            "standard_error_seconds": 0.0,
            "clock_seconds": clock_seconds,
        }

    runs = [run("bmm", 1.0, 3.0), run("grouped_mm", 2.0, 2.0), run("hopper_grouped", 1.0, 4.0), run("auto", 2.0, 1.6)]
    runs.append(run("auto_counted", 1.0, 1.0))
    cell = {"tokens": 16, "roofline_seconds": 1e-5, "sustained_roofline_seconds": 1e-5, "runs": runs}
    without = {"tokens": 16, "roofline_seconds": 1e-5, "sustained_roofline_seconds": 1e-5, "runs": runs[:3]}
    found = summarize([cell, without])
    assert (cell["auto_ratio"], cell["auto_ratio_with_host"]) == (0.5, 1.25)
    assert found["auto"]["worst_ratio_with_host"] == found["auto"]["geometric_mean_ratio_with_host"] == 1.25
    assert (cell["auto_counted_ratio"], cell["auto_counted_ratio_with_host"]) == (1.0, 2.0)
    assert found["auto_counted"]["worst_ratio_with_host"] == 2.0
    assert found["auto"]["cells_at_least_0.99"] == 0
    assert found["auto"]["cells_at_least_0.99_with_host"] == 1
    assert found["worst_ratio_with_host"] == 0.5, "ours without auto"
    assert "auto" not in summarize([without])


def test_contenders_have_names_of_their_own() -> None:
    kinds = (BASELINES, OURS, CHOSEN, COUNTED)
    assert len(kernels.CONTENDERS) == sum(map(len, kinds))


class Clock:
    """Stands for the module `time`: each look at it takes a tenth of a millisecond, and nothing else takes time."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-4
        return self.now


def test_a_cell_is_checked_and_timed_in_turns_but_for_the_hopeless(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BEXP_EXPERT_TABLES", str(tmp_path))
    monkeypatch.setattr(kernels, "K", 64)
    monkeypatch.setattr(kernels, "N", 32)
    monkeypatch.setattr(kernels, "BUDGET", TurnsBudget(rounds=2, chain_seconds=0.0, hopeless=math.inf))
    monkeypatch.setattr(kernels, "HOPELESS", 20.0)
    clock = Clock()
    for module in (kernels, turns):
        monkeypatch.setattr(module, "time", clock)

    def crashes(given: Problem) -> Operands:
        raise RuntimeError("no such kernel")

    def wrong(given: Problem) -> Operands:
        operands = BASELINES["loop"](given)
        return replace(operands, multiply=lambda x, w: operands.multiply(x, w) * 1.1)

    def slow(given: Problem) -> Operands:
        operands = BASELINES["loop"](given)

        def multiply(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            clock.now += 0.05
            return operands.multiply(x, w)

        return replace(operands, multiply=multiply)

    more = {"crashes": crashes, "wrong": wrong, "slow": slow}
    monkeypatch.setattr(kernels, "CONTENDERS", BASELINES | CHOSEN | COUNTED | more)
    names = ("slow", "loop", "bmm", "wrong", "grouped_mm", "crashes", "auto", "auto_counted")
    rows = kernels.time_cell((8, 0, 5, 3), names, CPU)
    assert [row["name"] for row in rows] == list(names)
    found = {row["name"]: row for row in rows}
    assert found["wrong"]["outcome"] == "wrong"
    assert found["crashes"]["reason"] == "RuntimeError: no such kernel"
    timed = ("slow", "loop", "bmm", "grouped_mm", "auto", "auto_counted")
    assert all(found[name]["outcome"] == "ok" and found[name]["clock_seconds"] > 0 for name in timed)
    assert not found["slow"]["in_turns"]
    assert found["slow"]["clock_seconds"] == pytest.approx(0.05, rel=0.01), "of one call, not of a chain"
    assert found["auto"]["in_turns"]
    assert found["auto"]["repeats"] == 2
