from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import expert_runs, result_rows, variable_gemm
from benchmarks.expert_problems import GEMMS, Gemms
from benchmarks.expert_runs import measure, run_cells
from benchmarks.isolation import LostError, messages
from benchmarks.turns import TurnsBudget
from benchmarks.variable_cases import CASES, EVEN, PAIR, REPORTED, UNEVEN, Case, routes_of
from benchmarks.variable_gemm import CELLS, Cell, describe, describe_summary, summarize, tiny_cells
from tests.benchmarks.processes import TURNS, NamedCell, die, hang
from tests.waits import PATIENCE_SECONDS

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_runs, "BUDGET", TurnsBudget(rounds=1, chain_seconds=0.0, most_seconds=0.0))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_token_goes_to_distinct_experts(case: Case) -> None:
    small = case.shrunk(256)
    for load in case.loads:
        counts = small.counts(load)
        routes = routes_of(counts, small.num_tokens)
        assert routes.shape == (small.num_tokens, case.top_k)
        assert torch.bincount(routes.flatten(), minlength=case.num_experts).tolist() == list(counts)
        assert all(len(set(experts)) == case.top_k for experts in routes.tolist())
    assert max(small.counts(EVEN)) - min(small.counts(EVEN)) <= 1


def test_the_reported_load_is_none_of_distinct_experts() -> None:
    """Its largest expert has twice as many rows as there are tokens, and 200 rows are missing."""
    assert sum(REPORTED) == PAIR.num_tokens * PAIR.top_k - 200
    assert max(REPORTED) > PAIR.num_tokens
    assert PAIR.loads == (EVEN,)
    assert sum(PAIR.reported[EVEN]) == sum(PAIR.reported[UNEVEN]) == sum(REPORTED)


def test_every_case_has_every_format() -> None:
    for case in CASES:
        assert {cell.dtype for cell in CELLS if cell.case == case} == set(expert_runs.TOLERANCES)
    assert len(CELLS) == len(set(CELLS))


def rows_of(cell: Cell) -> list[dict[str, Any]]:
    sent: list[Any] = []
    run_cells(sent.append, [cell], "cpu", frozenset(), frozenset(), 60.0)
    return list(sent[-1][1])


@pytest.mark.parametrize("number", range(3))
def test_a_cell_has_figures_of_each_contender_and_load(number: int) -> None:
    cell = tiny_cells()[number]
    rows = rows_of(cell)
    loads = {EVEN, UNEVEN} if cell.is_reported else set(cell.case.loads)
    for name in ("grouped_mm", "loop", "bmm"):
        mine = [row for row in rows if row["contender"] == name]
        assert {row["load"] for row in mine} == loads
        for row in mine:
            assert row["outcome"] == "ok"
            assert 0 < row["largest_error"] <= expert_runs.TOLERANCES[cell.dtype]
            assert row["seconds"] > 0
            assert "TFLOP/s" in describe(row)
    assert {row["outcome"] for row in rows if row["contender"] == "cublas_grouped"} == {"unsupported"}
    summary = summarize(rows)
    assert sum(each["fastest"] for each in summary["contenders"].values()) == len(loads)
    assert len(summary["uneven_over_even"]) == (3 if len(loads) == 2 else 0)
    assert all(list(describe_summary(summary)))


def test_a_wrong_result_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(x: torch.Tensor, w: torch.Tensor, given: Gemms) -> torch.Tensor:
        return torch.nn.functional.grouped_mm(x, w, offs=given.ends) * 1.1

    gemms = {"loop": (lambda count, most: count, off), "bmm": GEMMS["bmm"]}
    monkeypatch.setattr("benchmarks.expert_problems.GEMMS", gemms)
    rows = {row["contender"]: row for row in rows_of(tiny_cells()[0])}
    assert rows["loop"]["outcome"] == "wrong"
    assert "seconds" not in rows["loop"]
    assert rows["bmm"]["outcome"] == "ok"


def test_a_contender_that_takes_the_process_down_costs_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TURNS == expert_runs.TURNS
    monkeypatch.setattr(expert_runs, "run_cells", die)
    cells: Any = [NamedCell("first", ends=True), NamedCell("second")]
    first, second = measure(cells, "cpu", time.monotonic() + PATIENCE_SECONDS)
    assert {row["contender"]: row["outcome"] for row in first} == {"good": "ok", "bad": "crashed"}
    assert "status 3" in next(row["reason"] for row in first if row["contender"] == "bad")
    assert {row["contender"]: row["outcome"] for row in second} == {"good": "ok", "bad": "ok"}
    assert [row["contender"] for row in summarize(first)["ended"]] == ["bad"]


def test_a_process_that_is_silent_is_ended() -> None:
    found = messages(hang, silence_seconds=PATIENCE_SECONDS)
    assert next(found) == "one"
    found.close()  # its process is ended
    with pytest.raises(LostError, match=r"nothing within 0\.1 s"):
        list(messages(hang, silence_seconds=0.1))


def test_what_there_is_no_time_for_is_named(tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    assert variable_gemm.main(["--out", str(out), "--device", "cpu", "--tiny", "--max-seconds", "0"]) == 0
    found = json.loads(out.read_text())
    assert found["left_out"] == [cell.key for cell in tiny_cells()]
    assert found["rows"] == []


def test_a_run_goes_on_with_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "table.json"
    cells = tiny_cells()
    done: list[list[str]] = []

    def measured(cells: list[Cell], device: str, deadline: float) -> Iterator[list[dict[str, Any]]]:
        done.append([str(cell.key) for cell in cells])
        yield [cells[0].key | {"load": EVEN, "contender": "loop", "outcome": "unsupported", "reason": "no"}]

    monkeypatch.setattr(variable_gemm, "measure", measured)
    for _ in range(2):
        assert variable_gemm.main(["--out", str(out), "--device", "cpu", "--tiny"]) == 0
    assert done == [[str(cell.key) for cell in part] for part in (cells, cells[1:])]
    assert json.loads(out.read_text())["left_out"] == [cells[2].key]


def test_the_tables_say_what_became_of_each_contender() -> None:
    key: dict[str, Any] = {"kind": "ffn", "case": "(1, 2, 3, 4, 5)", "dtype": "bfloat16", "load": EVEN}
    right = {"outcome": "ok", "largest_error": 0.002, "peak_bytes": 2**34 + 1, "seconds": 1.0, "device_seconds": 1.0}
    rows = [
        key | right | {"contender": "loop", "flops_per_second": 5e12},
        key | {"contender": "bmm", "outcome": "out_of_memory", "reason": "no"},
        key | {"contender": "fused", "outcome": "unsupported", "reason": "no"},
        key | {"contender": "block_sparse", "outcome": "crashed", "reason": "no"},
    ]
    result = {"rows": rows, "summary": summarize(rows)}
    assert {row["contender"]: row["text"] for row in result_rows.variable(result, "bfloat16")} == {
        "loop": "5, 16.0 GiB",
        "bmm": "out of memory",
        "block_sparse": "crashed",
    }
    assert not list(result_rows.variable(result, "float16"))
    found = {row["name"]: row for row in result_rows.variable_outcomes(result)}
    assert "fused" not in found
    assert (found["loop"]["right"], found["loop"]["within_limit"], found["loop"]["errors"]) == (1, 0, "bfloat16 2e-03")
    assert found["bmm"]["out_of_memory"] == 1
    assert found["block_sparse"]["failed"] == 1
