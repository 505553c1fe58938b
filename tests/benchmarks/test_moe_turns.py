from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import moe_turns
from benchmarks.moe_turns import CELLS, GRAPH, Cell, compare_with_dense, describe, missing
from benchmarks.turns import TurnsBudget
from bexp.explorer.model.model import ModelSpec, MoESpec

CPU = torch.device("cpu")


def test_graphs_are_compared_with_dense_graphs() -> None:
    seconds = {
        "dense eager": 4.0,
        "dense compile": 2.0,
        "fused": 8.0,
        f"dense compile{GRAPH}": 1.0,
        f"fused{GRAPH}": 2.0,
    }
    cell: dict[str, Any] = {"kind": "layer", "num_experts": 8, "top_k": 2, "micro_batch_size": 1}
    rows = [cell | {"backend": name, "seconds": time, "device_seconds": time} for name, time in seconds.items()]
    rows.append(cell | {"backend": f"loop{GRAPH}", "reason": "it waits"})
    compare_with_dense(rows)
    found = {row["backend"]: row.get("relative_to_dense") for row in rows}
    assert found["fused"] == 0.25
    assert found[f"fused{GRAPH}"] == 0.5
    assert found[f"loop{GRAPH}"] is None
    assert "it waits" in describe(rows[-1])


def test_cells_with_rows_are_not_measured_again() -> None:
    done = [{"num_experts": 8, "top_k": 2, "micro_batch_size": 64, "backend": "fused"}]
    assert list(missing(done)) == [cell for cell in CELLS if cell != (8, 2, 64)]
    assert list(missing(done, [(128, 1, 64), (8, 2, 64)])) == [(128, 1, 64)]
    assert len(set(CELLS)) == len(CELLS)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of 32 numbers, timed once each; what is compiled elsewhere is not compiled here."""

    def model(num_experts: int, top_k: int) -> ModelSpec:
        moe = MoESpec(num_experts=num_experts, top_k=top_k, expert_ffn_hidden_size=16)
        sizes = {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": top_k * 16, "num_attention_heads": 2}
        return ModelSpec(**sizes, vocab_size=64, seq_length=32, moe=moe)

    monkeypatch.setattr(moe_turns, "layer_model", model)
    monkeypatch.setattr(moe_turns, "HIDDEN", 32)
    monkeypatch.setattr(moe_turns, "WIDTH", 16)
    monkeypatch.setattr(moe_turns, "SEQ_LENGTH", 32)
    monkeypatch.setattr(moe_turns, "BUDGET", TurnsBudget(rounds=2, chain_seconds=0.0))
    monkeypatch.setattr(moe_turns, "DENSE", ("dense eager",))
    monkeypatch.setattr(moe_turns, "_traceable", lambda name: False)


@pytest.mark.usefixtures("small")
def test_a_cell_has_a_row_a_contender_with_both_times() -> None:
    rows = Cell(4, 2, 2, CPU, 1e11).measure()
    compare_with_dense(rows)
    assert {row["backend"] for row in rows} >= {"dense eager", "grouped_mm", "loop", "bmm"}
    for row in rows:
        assert row["seconds"] > 0
        assert row["device_seconds"] > 0
        assert row["relative_to_dense"] > 0
        assert (row["bound_seconds"] is None) == (row["backend"] == "dense eager")
    grouped = next(row for row in rows if row["backend"] == "grouped_mm")
    assert grouped["bound_seconds"] == pytest.approx(3 * 4 * 3 * 32 * 16 * 2 / 1e11)


@pytest.mark.usefixtures("small")
def test_a_contender_that_fails_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_turns, "contenders", lambda model, device: ("grouped_mm", "fused"))
    rows = {row["backend"]: row for row in Cell(4, 2, 2, CPU, 1e11).measure()}
    assert "triton" in rows["fused"]["reason"].lower()
    assert rows["grouped_mm"]["seconds"] > 0
