"""The generated tables, from small recorded runs."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from benchmarks.docs import (
    attention,
    context_parallel,
    expert_gemms,
    goals,
    kernels,
    launches,
    meshes,
    models,
    results,
    search,
    sections,
)
from benchmarks.docs.results import load, measured_on
from benchmarks.gemm_contenders import OURS
from benchmarks.gemm_summary import summarize as summarize_gemm
from benchmarks.moe_summary import compare_with_dense

RECORDED = Path(__file__).parent / "recorded"


def _recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())
    return found


def _cells(text: str, label: str) -> list[list[str]]:
    """The cells of each table row that begins with this label."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [line[1:] for line in lines if line[0] == label]


def _goal(rows: Any, what: str) -> tuple[bool, str]:
    """Whether the one goal that begins like this was reached, and what was measured."""
    ((_, _, met, text),) = (row for row in rows if row[0].startswith(what))
    return met, text


# -- filling pages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grouped-gemm", "goals", "strategies", "request-fields"])
def test_a_marked_section_is_filled_and_filling_twice_changes_nothing(name: str) -> None:
    filled = sections.fill(f"before\n<!-- {name} -->\nold\n<!-- /{name} -->\nafter\n")
    assert "old" not in filled
    assert filled.startswith("before\n") and filled.endswith("after\n")
    assert sections.fill(filled) == filled
    tables = [block.splitlines() for block in filled.split("\n\n") if block.startswith("|")]
    assert all(len({line.count(" | ") for line in lines if line.startswith("|")}) == 1 for lines in tables)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<!-- gaols -->\n<!-- /gaols -->\n", "nothing fills the section gaols"),
        ("<!-- goals -->\n", "one opening and one closing marker: goals"),
        ("<!-- /bta -->\n", "one opening and one closing marker: bta"),
    ],
)
def test_a_wrong_marker_is_an_error(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        sections.fill(text)


def test_each_section_stands_on_one_page() -> None:
    shown = [match["name"] for page in sections.pages() for match in sections.MARKER.finditer(page.read_text())]
    assert sorted(shown) == sorted(sections.SECTIONS)


def test_results_that_are_not_there_leave_a_section_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    found = {name: section() for name, section in sections.SECTIONS.items()}
    assert {name for name, text in found.items() if text} == {"request-fields"}


def test_a_run_that_was_continued_has_all_its_days() -> None:
    found = _recorded("bta")
    found["environment"]["date"] = "2026-01-01T12:00:00"
    assert measured_on(found).endswith(", 2026-01-01.\n")
    days = ["2026-01-01T13:00:00", "2026-01-03T09:00:00"]
    assert measured_on(found | {"continued": days}).endswith(", 2026-01-01 and 2026-01-03, in 3 runs.\n")


# -- kernels -------------------------------------------------------------------------------------------------------


def test_grouped_gemms_show_the_device_and_the_host_side_by_side() -> None:
    found = _recorded("grouped-gemm")
    for run in (run for cell in found["cells"] for run in cell["runs"]):
        run.setdefault("standard_error_seconds", 0.0)
        if run["name"] in OURS and "host_seconds" in run:
            run["host_seconds"] = 10 * run["seconds"]
    for cell in found["cells"]:
        cell.setdefault("sustained_roofline_seconds", cell["roofline_seconds"])
    found["summary"] = summarize_gemm(found["cells"])
    few = next(c for c in found["cells"] if (c["tokens"], c["distribution"]) == (16, "uniform"))
    shown = _cells(kernels.grouped_gemm(found), "16")[0][0]
    assert shown.startswith(f"{few['ratio']:.2f}")
    assert f"({few['ratio_with_host']:.2f})" in shown
    assert few["ratio_with_host"] < few["ratio"]
    few["runs"][-1]["outcome"] = "wrong"
    assert few["runs"][-1]["name"] in _cells(kernels.grouped_gemm(found), "wrong results")[0][0]


def test_auto_is_shown_by_the_clock_and_on_the_device() -> None:
    def run(name: str, seconds: float, clock_seconds: float) -> dict[str, Any]:
        times = {"seconds": seconds, "clock_seconds": clock_seconds}
        errors = {"standard_error_seconds": 0.0, "clock_error_seconds": 0.03 * clock_seconds}
        return {"name": name, "outcome": "ok"} | times | errors

    where = {"experts": 8, "tokens": 16, "roofline_seconds": 1e-5, "sustained_roofline_seconds": 1e-5}
    runs = [run("bmm", 1.0, 3.0), run("grouped_mm", 1.5, 2.0), run("auto", 2.0, 1.6)]
    cells: list[dict[str, Any]] = [where | {"distribution": "uniform", "runs": runs}]
    cells.append(where | {"distribution": "zipf", "runs": []})
    found = _recorded("grouped-gemm") | {"cells": cells, "summary": summarize_gemm(cells), "table_seconds": 12.0}
    text = kernels.auto_gemm(found)
    assert _cells(text, "16") == [["1.25 (0.50)"]]
    assert _cells(text, "cells of at least 0.99x, by the clock") == [["1 of 1"]]
    assert _cells(text, "worst cell, on the device") == [["0.50x"]]
    assert _cells(text, "fastest stock one by the clock") == [["grouped_mm 1"]]
    assert _cells(text, "standard error of a cell's ratio by the clock, median") == [["4.2%"]]
    assert _cells(text, "cells left out for want of time") == [["1"]]


def test_layers_by_the_clock_show_the_fastest_of_each_kind() -> None:
    cell: dict[str, Any] = {"kind": "layer", "num_experts": 8, "top_k": 2, "micro_batch_size": 1}
    seconds = {"dense eager": 2e-3, "dense compile": 1e-3, "grouped_mm": 5e-3, "fused": 4e-3, "auto": 4.1e-3}
    seconds |= {"dense compile graph": 5e-4, "fused graph": 1e-3}
    rows = [
        cell | {"backend": n, "seconds": s, "device_seconds": s / 2, "bound_seconds": 6e-4} for n, s in seconds.items()
    ]
    rows.append(cell | {"backend": "loop", "reason": "out of memory"})
    compare_with_dense(rows)
    found = {"rows": rows, "errors": [{"error": 3e-3}]} | {k: _recorded("bta")[k] for k in ("environment", "hardware")}
    dense, stock, best, auto, graph, best_graph = _cells(kernels.moe_turns(found), "E=8 top_k=2 m=1")[0]
    assert dense == "dense compile 1 ms (device 0.5)"
    assert stock == "grouped_mm 5 ms (device 2.5), 0.20x"
    assert best == "fused 4 ms (device 2), 0.25x"
    assert auto == "auto 4.1 ms (device 2.05), 0.24x"
    assert graph == "dense compile 0.5 ms (device 0.25)"
    assert best_graph == "fused 1 ms (device 0.5), 0.50x, 60% of the bytes' bound"
    what = "by the clock faster than on the device, so under other conditions"
    assert not _cells(kernels.moe_turns(found), what)
    rows[2] |= {"device_seconds": 5.4e-3, "clock_error_seconds": 1e-4, "device_error_seconds": 1e-4}
    rows[3] |= {"device_seconds": 4.4e-3, "clock_error_seconds": 1e-4, "device_error_seconds": 1e-4}
    assert _cells(kernels.moe_turns(found), what) == []
    rows[3] |= {"device_seconds": 4.5e-3}
    assert _cells(kernels.moe_turns(found), what) == [["fused 4 ms (device 4.5) at E=8 top_k=2 m=1"]]


def test_tiles_are_shown_beside_the_default_one() -> None:
    found = _recorded("quack")
    text = expert_gemms.quack(found)
    assert [cells[:2] for cells in _cells(text, "E=8 top_k=2")] == [
        ["quack, default tiles", "24.4 ms (23.8 to 24.7)"],
        ["dense compile", "20.0 ms (19.0 to 21.0)"],
    ]
    assert [cells[4] for cells in _cells(text, "E=8 top_k=2")] == ["0.82x", "1.00x"]
    assert _cells(text, "gradient of w_in") == [["547 by default, 694 with 128x256co 2x1"]]
    assert _cells(text, "gradient of the rows") == [["674 by default"]]
    assert _cells(text, "largest relative error against float64, default tiles") == [["4.0e-03"]]


def test_other_kernels_of_the_fused_experts_are_shown_beside_the_chosen_ones() -> None:
    def seconds(clock: float, device: float) -> dict[str, float]:
        return {"clock_seconds": clock, "clock_error_seconds": clock / 50, "device_seconds": device}

    ways = {"chosen": seconds(2e-3, 1e-3), "slow": seconds(4e-3, 2e-3), "slow, forward": seconds(1e-3, 2e-3)}
    errors = {"slow out": 0.25, "slow x": 0.5, "slow, forward out": 0.0}
    row = {"model": "small", "layer": {"num_tokens": 4096}, "seconds": ways, "errors": errors}
    found = {"environment": _recorded("bta")["environment"], "device": "a card", "rows": [row]}
    text = expert_gemms.fused_choice(found)
    assert _cells(text, "small, 4,096") == [["2.00 ms (1.00)", "0.50 (0.50)", "2.00 (0.50)"]]
    assert _cells(text, "standard error of a time by the clock, median") == [["2.0%"]]
    assert _cells(text, "results of `slow`") == [["differ by 5.0e-01, relative to the chosen one's"]]
    assert _cells(text, "results of `slow, forward`") == [["the chosen one's, bit by bit"]]
    assert "Measured on a card" in text


def test_launches_are_shown_in_units_and_microseconds() -> None:
    def layer(factor: float) -> dict[str, Any]:
        bare = {"fused: forward without autograd": 3.0, "fused: backward without autograd": 5.0}
        alone = {"fused forward and backward": 30.0, "autograd alone, forward and backward": 14.0}
        chain = {"fused, a layer in a chain": 20.0, "autograd alone, a layer in a chain": 7.0}
        return {"launches": {name: factor * units for name, units in (bare | alone | chain).items()}}

    names = [
        f"{name} {of}" for name in ("hopper_grouped", "triton_grouped") for of in ("multiply_rows", "sum_over_rows")
    ]
    found = {
        "launch_us": 10.0,
        "device": "H100",
        "environment": {"date": "2026-11-22T1", "packages": {"torch": "2.11"}},
    }
    found |= {
        "gemms": [{"launches": dict(zip(names, (1.0, 1.3, 1.2, 1.6), strict=True))}],
        "layers": [layer(1), layer(1.5)],
    }
    text = launches.launch_cost(found)
    assert _cells(text, "a grouped GEMM of `hopper_grouped`, or its sum over rows") == [
        ["1.0 to 1.3", "10 to 13", "1.5"]
    ]
    assert _cells(text, "`fused`, forward and backward without autograd") == [["8.0 to 12.0", "80 to 120", "8.0"]]
    assert _cells(text, "an autograd function that launches nothing, alone") == [["14.0 to 21.0", "140 to 210", "-"]]


def test_composed_steps_of_meshes_stand_beside_whole_ones() -> None:
    row = {"model": "a", "num_layers": 8, "mesh": "EP=2", "micro_batch_size": 1, "outcome": "ok", "reason": None}
    times = {
        "whole_step_seconds": 0.5,
        "standard_error_seconds": 0.01,
        "composed_step_seconds": 0.4,
        "step_error": -0.2,
    }
    peaks = {"whole_peak_bytes": 2 << 30, "peak_error": 0.05}
    failed = row | {"mesh": "TP=2", "outcome": "timed_out", "commit": "def"}
    found = {"commit": "abc", "rows": [row | times | peaks, failed]}
    text = meshes.mesh_fidelity(found | {k: _recorded("bta")[k] for k in ("environment", "hardware")})
    first, second = _cells(text, "a, 8 layers")
    assert first == ["EP=2", "1", "500.0 ms", "10.0 ms", "400.0 ms", "-20.0%", "2.0 GiB", "+5.0%", "abc"]
    assert second == ["TP=2", "1", "-", "-", "-", "timed_out", "-", "-", "def"]


def test_variable_gemms_show_rates_and_outcomes() -> None:
    found = _recorded("variable-gemm")
    uneven = "(64, 1024, 512, 8, 8) uneven"
    names = [*found["contenders"]["baselines"], *found["contenders"]["ours"]]
    for row in found["runs"]:
        if (row["case"], row["contender"]) == (uneven, "loop"):
            row["training"] |= {"flops_per_second": 512.4e12, "seconds": 1.0, "host_seconds": 2.0}
    limited = deepcopy([row for row in found["runs"] if row["case"] == uneven][::2])
    for row in limited:
        row["limit_bytes"] = 16 << 30
        if row["contender"] == "bmm":
            row |= {"training": {"outcome": "out_of_memory"}, "forward": {"outcome": "ok"}}
        if row["contender"] == "loop":
            row["training"] = row["forward"] = {"outcome": "operands_exceed_limit"}
    text = kernels.variable_gemm(found | {"runs": found["runs"] + limited})
    whole, within = _cells(text, uneven)
    assert whole[names.index("loop")] == "512 (256)", "the host takes twice as long"
    assert whole[names.index("cublas_grouped")] == "unsupported"
    assert within[names.index("bmm")] == "forward"
    assert within[names.index("loop")] == "too large"
    assert _cells(kernels.variable_gemm(found | {"left_out": [{}] * 7}), "runs left out for want of time") == [["7"]]


def test_moe_layers_show_the_fastest_by_each_clock() -> None:
    found = _recorded("moe-layer")
    for row in found["rows"]:
        if row["micro_batch_size"] == 4 and row["backend"] == "fused":
            row |= {"device_seconds": 1e-6, "host_seconds": 1.0, "seconds": 1.0}
    compare_with_dense(found["rows"])
    fused = next(row for row in found["rows"] if (row["micro_batch_size"], row["backend"]) == (4, "fused"))
    assert fused["device_relative_to_dense"] > 1 > fused["relative_to_dense"]
    device, host = _cells(kernels.moe_layer(found), "E=128 top_k=1 m=4")[0]
    assert device.startswith("fused ")
    assert not host.startswith("fused ")


# -- attention -----------------------------------------------------------------------------------------------------


def test_batch_tiling_counts_where_tiles_win() -> None:
    found = _recorded("bta")
    row = found["rows"][1]
    for key in row["best"]:
        row["best"][key]["candidate"]["bta_tile"] = 1 if key.startswith("40GiB") or key.endswith("tiled") else None
    for other in found["rows"][2:]:
        other |= {"best": {key: {} for key in other["best"]}, "relative_to_dense": {}}
    row["relative_to_dense"] |= {"40GiB/plain": 0.47, "40GiB/tiled": 0.94, "40GiB/explored": 1.01}
    text = attention.bta(found)
    row = next(row for row in found["rows"] if row["num_experts"] is not None and row["relative_to_dense"])
    row["device_relative_to_dense"] = dict.fromkeys(row["relative_to_dense"], 0.123)
    assert "(0.12 / " in attention.bta(found)
    assert _cells(text, "E=8 top_k=1")[0][0] == "0.47 / 0.94 / 1.01"
    assert _cells(text, "E=8 top_k=2")[0][0] == "- / - / -"
    assert _cells(text, "80GiB: models whose best tiles where tiling is allowed") == [["1 of 2"]]
    assert _cells(text, "80GiB: models for which tiles are recommended") == [["0 of 2"]]


def test_the_choice_of_attention_says_how_far_the_picks_are() -> None:
    found = _recorded("attention-choice")
    cell = next(cell for cell in found["cells"] if (cell["seq_length"], cell["kind"]) == (128, "MQA"))
    cell["picked"] = "flash"
    cell["verdict"]["block"]["ratio"], cell["verdict"]["core"]["ratio"] = 1.0234, None
    found["summary"]["block"] = {"within": 3, "share_within": 0.75, "worst_ratio": 1.0234}
    text = attention.attention_choice(found)
    assert _cells(text, "D=16 MQA")[0][1] == "flash 1.023, -"
    assert _cells(text, "picks within 1% of the fastest, by the attention block") == [["3 of 4, worst 1.023"]]


def test_recomputation_has_a_column_for_each_model_and_back_end() -> None:
    found = load("h200-recomputation")
    row = next(
        row
        for row in found["rows"]
        if row["candidate"]["expert_backend"] == "fused" and row["candidate"]["recompute"] == "projections"
    )
    text = attention.recomputation(found)
    assert f"{row['bytes_share']:.0%}, {row['step_cost']:+.1%}" == _cells(text, "projections")[0][1]
    assert _cells(text, "experts")[0][2] == "-"  # a dense model has none


def test_a_margin_within_the_spread_reads_level() -> None:
    found = load("h200x4-context-parallel")
    text = context_parallel.attention(found)
    length = found["summary"]["ours_over_peers"][0]["seq_length"]
    margins = {line[0]: line for line in (_cells(text, str(length))[-1:])}
    assert margins["zigzag"][-1] == "level"
    goal = "the fastest of ours against the fastest other code"
    assert _cells(text, goal)[0][1:] == ["yes", "faster at 1, level at 4, slower at 0 lengths"]
    found["summary"]["ours_over_peers"][0]["verdict"] = "slower"
    assert _cells(context_parallel.attention(found), goal)[0][1] == "no"


def test_steps_show_layouts_their_runs_and_what_was_chosen() -> None:
    found = load("h200x4-context-parallel-step")
    cell = found["cells"][0]
    row = next(row for row in cell["layouts"] if row["layout"] == "striped")
    row |= {"num_runs": 2, "spread": 0.034, "contaminated": True}
    cell["runs"][0]["outcome"] = "timed_out"
    text = context_parallel.steps(found | {"left_out": ["S=1"]})
    shown = _cells(text, str(cell["seq_length"]))[0]
    assert shown[1] == "2"
    assert "spread 3.4%" in shown[3]
    assert shown[3].endswith("contaminated")
    assert shown[-1] == "4 zigzag, 100.0% of the fastest"
    assert f"Failed: S={cell['seq_length']} ring none: timed_out." in text
    assert "Left out for want of time: S=1." in text


# -- goals, models and searches ------------------------------------------------------------------------------------


def test_rivals_on_single_tables_miss_the_goal_even_if_there_is_none_over_all() -> None:
    found = _recorded("replay")
    what = "strategies that take less device time with equal or better regret"
    rows = [*goals.of_replay(found)]
    assert _goal(rows, f"{what}, on each table") == (False, "1 cases on 1 of 3 tables")
    assert _goal(rows, f"{what}, over all tables") == (True, "none")
    assert _cells(search.rivals(found), "large") == [["DeepSpeed's fast mode"]]
    lucky = found["summary"]["strategies"]["largest that fits"]
    lucky |= {"regret": {"median": 0.0, "p95": 0.0, "max": 0.0}, "regret_mean": 0.0}
    lucky["seconds"]["median"] = 0.1
    assert _goal(goals.of_replay(found), f"{what}, over all tables") == (False, "largest that fits")


def test_replayed_searches_are_held_to_their_goals() -> None:
    found = _recorded("replay")
    assert _goal(goals.of_replay(found), "regret") == (True, "median 0.0%, p95 0.0%, max 0.0%")
    assert _goal(goals.of_replay(found), "expected")[0] is False
    assert _goal(goals.of_replay(found), "trials")[1].startswith("in 2 of 2 tables")
    found["summary"]["goals"] = None
    assert [*goals.of_replay(found)] == []


def test_time_to_confidence_is_held_to_the_limit_of_the_model() -> None:
    found = load("h200-explorations")
    run = next(r for r in found["runs"] if r["name"] == "olmoe-1b-7b") | {"submit_to_confidence_90_seconds": 31.0}
    assert _goal(goals.of_explorations({"runs": [run]}), "submit") == (True, "olmoe-1b-7b 31 s")
    late = deepcopy(run) | {"submit_to_confidence_90_seconds": None}
    late["trials"][-1]["measurement"]["outcome"] = "out_of_memory"
    assert late["trials"][-1]["kind"] == "whole_model"
    assert _goal(goals.of_explorations({"runs": [late]}), "submit") == (False, "olmoe-1b-7b never")
    assert _goal(goals.of_explorations({"runs": [run, late]}), "recommended") == (False, "1 of 2 whole-model runs")


def test_fidelity_needs_enough_configurations() -> None:
    rows: list[dict[str, Any]] = [{"name": "a", "check": {"step_error": -0.02, "peak_error": 0.0}} for _ in range(8)]
    assert _goal(goals.of_fidelity({"rows": rows}), "step") == (
        True,
        "median 2.0%, max 2.0% over 8 configurations of 1 tables",
    )
    rows[0]["check"]["step_error"], rows[0]["host_bound"] = 0.081, True
    met, text = _goal(goals.of_fidelity({"rows": rows}), "step")
    assert not met
    assert text.endswith("; median 2.0%, max 2.0% over the 7 that the device limits")
    assert _goal(goals.of_fidelity({"rows": rows[1:]}), "peak")[0] is False


def test_a_gain_over_a_predicted_candidate_is_marked() -> None:
    (run,) = load("h200-olmoe-fused")["runs"]
    assert models.compared(run, "stock") == "1.24x (predicted in part)"
    assert models.compared(run, "largest_without_recompute") == "1.00x"
    del run["comparisons"]
    assert models.compared(run, "stock") is None


def test_strategies_and_reliability_show_what_the_summary_holds() -> None:
    found = _recorded("replay")
    ours, row = found["summary"]["strategies"]["bexp"], found["summary"]["calibration"]["reliability"][-1]
    text = search.strategies(found)
    assert _cells(text, "`bexp`")[0][1] == f"{ours['trials']['median']:.0f}"
    assert _cells(text, "large")[0][0] == "1008"
    assert "3 seeds a table (Optuna's GP 1)" in text
    shown = _cells(search.reliability(found), "90 to 99")[0]
    assert shown == [f"{row['num_lines']:.0f}", *(f"{100 * row[of]:.1f}%" for of in ("mean_forecast", "share_true"))]
    found["summary"]["calibration"] = None
    assert search.reliability(found) == ""


def test_transformers_curves_are_relative_and_out_of_memory_is_shown() -> None:
    found = _recorded("transformers")
    for row in found["rows"]:
        row["tokens_per_second"] = 1000.0 * row["micro_batch_size"]
        if (row["side"], row["micro_batch_size"]) == ("transformers", 4):
            row["outcome"] = "out_of_memory"
    lines = [line.strip("| ").split(" | ") for line in models.transformers(found).splitlines()]
    assert lines[2][2:] == ["1.00 (1.0)", "2.00 (2.0)", "out of memory", "2"]
