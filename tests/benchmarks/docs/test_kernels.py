"""The generated tables of kernels, launches and meshes, from small recorded runs."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from benchmarks.docs import expert_gemms, kernel_goals, kernels, launches, meshes
from benchmarks.gemm_contenders import OURS
from benchmarks.gemm_summary import summarize as summarize_gemm
from benchmarks.moe_summary import compare_with_dense
from tests.benchmarks.docs.tables import cells, goal, recorded


def test_grouped_gemms_show_the_device_and_the_host_side_by_side() -> None:
    found = recorded("grouped-gemm")
    for run in (run for cell in found["cells"] for run in cell["runs"]):
        run.setdefault("standard_error_seconds", 0.0)
        if run["name"] in OURS and "host_seconds" in run:
            run["host_seconds"] = 10 * run["seconds"]
    for cell in found["cells"]:
        cell.setdefault("sustained_roofline_seconds", cell["roofline_seconds"])
    found["summary"] = summarize_gemm(found["cells"])
    few = next(c for c in found["cells"] if (c["tokens"], c["distribution"]) == (16, "uniform"))
    shown = cells(kernels.grouped_gemm(found), "16")[0][0]
    assert shown.startswith(f"{few['ratio']:.2f}")
    assert f"({few['ratio_with_host']:.2f})" in shown
    assert few["ratio_with_host"] < few["ratio"]
    few["runs"][-1]["outcome"] = "wrong"
    assert few["runs"][-1]["name"] in cells(kernels.grouped_gemm(found), "wrong results")[0][0]


def test_auto_is_shown_by_the_clock_and_on_the_device() -> None:
    def run(name: str, seconds: float, clock_seconds: float) -> dict[str, Any]:
        times = {"seconds": seconds, "clock_seconds": clock_seconds}
        errors = {"standard_error_seconds": 0.0, "clock_error_seconds": 0.03 * clock_seconds}
        return {"name": name, "outcome": "ok"} | times | errors

    where = {"experts": 8, "tokens": 16, "roofline_seconds": 1e-5, "sustained_roofline_seconds": 1e-5}
    runs = [run("bmm", 1.0, 3.0), run("grouped_mm", 1.5, 2.0), run("auto", 2.0, 1.6)]
    measured: list[dict[str, Any]] = [where | {"distribution": "uniform", "runs": runs}]
    measured.append(where | {"distribution": "zipf", "runs": []})
    found = recorded("grouped-gemm") | {"cells": measured, "summary": summarize_gemm(measured), "table_seconds": 12.0}
    text = kernels.auto_gemm(found)
    assert cells(text, "16") == [["1.25 (0.50)"]]
    assert cells(text, "cells of at least 0.99x, by the clock") == [["1 of 1"]]
    assert cells(text, "worst cell, on the device") == [["0.50x"]]
    assert cells(text, "fastest stock one by the clock") == [["grouped_mm 1"]]
    assert cells(text, "standard error of a cell's ratio by the clock, median") == [["4.2%"]]
    assert cells(text, "cells left out for want of time") == [["1"]]


def test_layers_by_the_clock_show_the_fastest_of_each_kind() -> None:
    cell: dict[str, Any] = {"kind": "layer", "num_experts": 8, "top_k": 2, "micro_batch_size": 1}
    seconds = {"dense eager": 2e-3, "dense compile": 1e-3, "grouped_mm": 5e-3, "fused": 4e-3, "auto": 4.1e-3}
    seconds |= {"dense compile graph": 5e-4, "fused graph": 1e-3}
    rows = [
        cell | {"backend": n, "seconds": s, "device_seconds": s / 2, "bound_seconds": 6e-4} for n, s in seconds.items()
    ]
    rows.append(cell | {"backend": "loop", "reason": "out of memory"})
    compare_with_dense(rows)
    found = {"rows": rows, "errors": [{"error": 3e-3}]} | {k: recorded("bta")[k] for k in ("environment", "hardware")}
    dense, stock, best, auto, graph, best_graph = cells(kernels.moe_turns(found), "E=8 top_k=2 m=1")[0]
    assert dense == "dense compile 1 ms (device 0.5)"
    assert stock == "grouped_mm 5 ms (device 2.5), 0.20x"
    assert best == "fused 4 ms (device 2), 0.25x"
    assert auto == "auto 4.1 ms (device 2.05), 0.24x"
    assert graph == "dense compile 0.5 ms (device 0.25)"
    assert best_graph == "fused 1 ms (device 0.5), 0.50x, 60% of the bytes' bound"
    what = "by the clock faster than on the device, so under other conditions"
    assert not cells(kernels.moe_turns(found), what)
    rows[2] |= {"device_seconds": 5.4e-3, "clock_error_seconds": 1e-4, "device_error_seconds": 1e-4}
    rows[3] |= {"device_seconds": 4.4e-3, "clock_error_seconds": 1e-4, "device_error_seconds": 1e-4}
    assert cells(kernels.moe_turns(found), what) == []
    rows[3] |= {"device_seconds": 4.5e-3}
    assert cells(kernels.moe_turns(found), what) == [["fused 4 ms (device 4.5) at E=8 top_k=2 m=1"]]


def test_tiles_are_shown_beside_the_default_one() -> None:
    found = recorded("quack")
    text = expert_gemms.quack(found)
    assert [cells[:2] for cells in cells(text, "E=8 top_k=2")] == [
        ["quack, default tiles", "24.4 ms (23.8 to 24.7)"],
        ["dense compile", "20.0 ms (19.0 to 21.0)"],
    ]
    assert [cells[4] for cells in cells(text, "E=8 top_k=2")] == ["0.82x", "1.00x"]
    assert cells(text, "gradient of w_in") == [["547 by default, 694 with 128x256co 2x1"]]
    assert cells(text, "gradient of the rows") == [["674 by default"]]
    assert cells(text, "largest relative error against float64, default tiles") == [["4.0e-03"]]


def test_other_kernels_of_the_fused_experts_are_shown_beside_the_chosen_ones() -> None:
    def seconds(clock: float, device: float) -> dict[str, float]:
        return {"clock_seconds": clock, "clock_error_seconds": clock / 50, "device_seconds": device}

    ways = {"chosen": seconds(2e-3, 1e-3), "slow": seconds(4e-3, 2e-3), "slow, forward": seconds(1e-3, 2e-3)}
    errors = {"slow out": 0.25, "slow x": 0.5, "slow, forward out": 0.0}
    row = {"model": "small", "layer": {"num_tokens": 4096}, "seconds": ways, "errors": errors}
    found = {"environment": recorded("bta")["environment"], "device": "a card", "rows": [row]}
    text = expert_gemms.fused_choice(found)
    assert cells(text, "small, 4,096") == [["2.00 ms (1.00)", "0.50 (0.50)", "2.00 (0.50)"]]
    assert cells(text, "standard error of a time by the clock, median") == [["2.0%"]]
    assert cells(text, "results of `slow`") == [["differ by 5.0e-01, relative to the chosen one's"]]
    assert cells(text, "results of `slow, forward`") == [["the chosen one's, bit by bit"]]
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
    assert cells(text, "a grouped GEMM of `hopper_grouped`, or its sum over rows") == [
        ["1.0 to 1.3", "10 to 13", "1.5"]
    ]
    assert cells(text, "`fused`, forward and backward without autograd") == [["8.0 to 12.0", "80 to 120", "8.0"]]
    assert cells(text, "an autograd function that launches nothing, alone") == [["14.0 to 21.0", "140 to 210", "-"]]


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
    text = meshes.mesh_fidelity(found | {k: recorded("bta")[k] for k in ("environment", "hardware")})
    first, second = cells(text, "a, 8 layers")
    assert first == ["EP=2", "1", "500.0 ms", "10.0 ms", "400.0 ms", "-20.0%", "2.0 GiB", "+5.0%", "abc"]
    assert second == ["TP=2", "1", "-", "-", "-", "timed_out", "-", "-", "def"]


def test_variable_gemms_show_rates_and_outcomes() -> None:
    found = recorded("variable-gemm")
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
    whole, within = cells(text, uneven)
    assert whole[names.index("loop")] == "512 (256)", "the host takes twice as long"
    assert whole[names.index("cublas_grouped")] == "unsupported"
    assert within[names.index("bmm")] == "forward"
    assert within[names.index("loop")] == "too large"
    assert cells(kernels.variable_gemm(found | {"left_out": [{}] * 7}), "runs left out for want of time") == [["7"]]


def test_moe_layers_show_the_fastest_by_each_clock() -> None:
    found = recorded("moe-layer")
    for row in found["rows"]:
        if row["micro_batch_size"] == 4 and row["backend"] == "fused":
            row |= {"device_seconds": 1e-6, "host_seconds": 1.0, "seconds": 1.0}
    compare_with_dense(found["rows"])
    fused = next(row for row in found["rows"] if (row["micro_batch_size"], row["backend"]) == (4, "fused"))
    assert fused["device_relative_to_dense"] > 1 > fused["relative_to_dense"]
    device, host = cells(kernels.moe_layer(found), "E=128 top_k=1 m=4")[0]
    assert device.startswith("fused ")
    assert not host.startswith("fused ")


def _layer(backend: str, ratio: float, *, cell: tuple[int, int, int] = (8, 2, 64)) -> dict[str, Any]:
    num_experts, top_k, micro_batch = cell
    key = {"num_experts": num_experts, "top_k": top_k, "micro_batch_size": micro_batch, "backend": backend}
    times = {
        "seconds": 1 / ratio,
        "device_seconds": 1 / ratio,
        "clock_error_seconds": 0.02 / ratio,
        "bound_seconds": 0.5,
    }
    return key | times | {"relative_to_dense": ratio, "device_relative_to_dense": ratio}


def _turns() -> dict[str, Any]:
    layers = [
        ("dense compile", 1),
        ("bmm", 0.5),
        ("grouped_mm compile", 0.625),
        ("fused", 0.8),
        ("fused compile", 0.75),
    ]
    graphs = [("dense compile graph", 1), ("grouped_mm compile graph", 0.625), ("fused graph", 0.8)]
    rows = [_layer(*each) for each in layers] + [_layer(*each, cell=(128, 1, 4)) for each in graphs]
    packages = {"torch": "2.11"}
    return {
        "rows": rows,
        "errors": [],
        "environment": {"date": "2026-11-22T1", "packages": packages},
        "device": "a card",
    }


def test_a_compiled_layer_of_a_stock_back_end_counts_as_stock() -> None:
    text = kernels.moe_turns(_turns())
    ((dense, stock, fastest, *_),) = cells(text, "E=8 top_k=2 m=64")
    assert dense.startswith("dense compile") and stock.startswith("grouped_mm compile") and fastest.startswith("fused ")
    (graphs,) = cells(text, "E=128 top_k=1 m=4")
    assert graphs[-2].startswith("grouped_mm compile 1.6e+03 ms") and graphs[-1].startswith("fused 1.25e+03 ms")
    said = "0.75x to 0.80x by the clock, 0.75x to 0.80x on the device"
    assert cells(text, "`fused`, compiled and as `auto`, of dense at E=8 top_k=2 m=64") == [[said]]
    assert cells(text, "standard error of a time by the clock, median and largest") == [["2.0%, 2.0%"]]


def test_goals_of_layers_name_the_best_and_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(kernel_goals.of_layers(_turns()))
    met, text = goal(rows, "MoE layer of dense, E=8 top_k=2 m=64")
    assert not met and text == "0.80x by fused, the best of 4; 0.80x on the device"
    assert goal(rows, "E=128 top_k=1 m=4") == (False, "40% by fused graph")
    monkeypatch.setattr(kernel_goals, "find", lambda name: _turns() if name == "h100-moe-turns" else None)
    assert kernel_goals.goals().count("(earlier kernels)") == len(rows)
    monkeypatch.setattr(kernel_goals, "find", lambda name: None)
    assert kernel_goals.goals() == ""
