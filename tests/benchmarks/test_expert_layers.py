from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import expert_runs
from benchmarks.expert_layers import CELLS, SHAPES, ZIPF, Cell, describe, describe_summary, summarize, tiny_cells
from benchmarks.expert_runs import run_cells
from benchmarks.turns import TurnsBudget


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_runs, "BUDGET", TurnsBudget(rounds=1, chain_seconds=0.0, most_seconds=0.0))


def test_the_shapes_are_those_of_the_table() -> None:
    assert len(set(CELLS)) == 2 * len(SHAPES) == 24
    assert {cell.num_experts for cell in CELLS} >= {8, 128}
    assert {cell.top_k for cell in CELLS} >= {1, 8}
    assert min(cell.num_tokens for cell in CELLS) == 512
    assert max(cell.num_tokens for cell in CELLS) == 32768


@pytest.mark.parametrize("cell", tiny_cells(), ids=lambda cell: cell.load)
def test_each_contender_is_right_and_has_the_faster_layout(cell: Cell) -> None:
    sent: list[Any] = []
    run_cells(sent.append, [cell], "cpu", frozenset(), frozenset(), 60.0)
    rows = {row["contender"]: row for row in sent[-1][1]}
    for name in ("grouped_mm", "loop", "bmm"):
        assert rows[name]["outcome"] == "ok"
        assert rows[name]["layout"] in {"as in transformers", "transposed"}
        assert rows[name]["seconds"] > 0
    assert rows["fused"]["outcome"] == "unsupported"
    assert all(map(describe, rows.values()))


def test_zipf_loads_are_those_of_a_profile() -> None:
    cell = replace(tiny_cells()[0], num_experts=8, num_tokens=20_000, load=ZIPF)
    ((_, layer),) = cell.problems(torch.device("cpu"))
    counts = torch.bincount(layer.routes.flatten(), minlength=8)  # type: ignore[attr-defined]  # of a `Layer`
    assert counts.sum() == 40_000
    assert counts[0] > 3 * counts[7]


def row(contender: str, seconds: float, load: str = "even", error: float = 0.0) -> dict[str, Any]:
    key = {"num_experts": 8, "top_k": 2, "num_tokens": 512, "load": load}
    times = {"seconds": seconds, "device_seconds": seconds, "clock_error_seconds": error, "device_error_seconds": error}
    return {**key, "contender": contender, "outcome": "ok", "peak_bytes": 2**30, **times}


def test_ours_is_compared_with_the_best_other_of_each_shape() -> None:
    rows = [row("fused", 1.0), row("hopper_grouped", 2.0), row("loop", 3.0), row("grouped_mm", 1.5)]
    rows += [row("fused", 1.0, ZIPF, error=0.05), row("sonicmoe", 0.9, ZIPF)]
    found = summarize(rows)
    even, zipf = (shape["seconds"] for shape in found["shapes"])
    assert (even["ours"], even["best_other"], even["ratio"]) == ("fused", "grouped_mm", 1.5)
    assert zipf["ratio"] == pytest.approx(0.9)
    total = found["seconds"]
    assert (total["shapes"], total["level_or_better"]) == (2, 1)
    assert total["geometric_mean"] == pytest.approx((1.5 * 0.9) ** 0.5)
    assert "in 1 of 2 shapes" in list(describe_summary(found))[-1]
    level = summarize([row("fused", 1.0, error=0.06), row("sonicmoe", 0.9)])
    assert level["seconds"]["level_or_better"] == 1
