"""Recorded searches and whole models against their goals, from small recorded runs."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from benchmarks.docs import goals, models, search
from benchmarks.docs.results import load
from tests.benchmarks.docs.tables import cells, goal, recorded


def test_rivals_on_single_tables_miss_the_goal_even_if_there_is_none_over_all() -> None:
    found = recorded("replay")
    what = "strategies that take less device time with equal or better regret"
    rows = [*goals.of_replay(found)]
    assert goal(rows, f"{what}, on each table") == (False, "1 cases on 1 of 3 tables")
    assert goal(rows, f"{what}, over all tables") == (True, "none")
    assert cells(search.rivals(found), "large") == [["DeepSpeed's fast mode"]]
    lucky = found["summary"]["strategies"]["largest that fits"]
    lucky |= {"regret": {"median": 0.0, "p95": 0.0, "max": 0.0}, "regret_mean": 0.0}
    lucky["seconds"]["median"] = 0.1
    assert goal(goals.of_replay(found), f"{what}, over all tables") == (False, "largest that fits")


def test_replayed_searches_are_held_to_their_goals() -> None:
    found = recorded("replay")
    assert goal(goals.of_replay(found), "regret") == (True, "median 0.0%, p95 0.0%, max 0.0%")
    assert goal(goals.of_replay(found), "expected")[0] is False
    assert goal(goals.of_replay(found), "trials")[1].startswith("in 2 of 2 tables")
    found["summary"]["goals"] = None
    assert [*goals.of_replay(found)] == []


def test_time_to_confidence_is_held_to_the_limit_of_the_model() -> None:
    found = load("h200-explorations")
    run = next(r for r in found["runs"] if r["name"] == "olmoe-1b-7b") | {"submit_to_confidence_90_seconds": 31.0}
    assert goal(goals.of_explorations({"runs": [run]}), "submit") == (True, "olmoe-1b-7b 31 s")
    late = deepcopy(run) | {"submit_to_confidence_90_seconds": None}
    late["trials"][-1]["measurement"]["outcome"] = "out_of_memory"
    assert late["trials"][-1]["kind"] == "whole_model"
    assert goal(goals.of_explorations({"runs": [late]}), "submit") == (False, "olmoe-1b-7b never")
    assert goal(goals.of_explorations({"runs": [run, late]}), "recommended") == (False, "1 of 2 whole-model runs")


def test_fidelity_needs_enough_candidates() -> None:
    rows: list[dict[str, Any]] = [{"name": "a", "check": {"step_error": -0.02, "peak_error": 0.0}} for _ in range(8)]
    assert goal(goals.of_fidelity({"rows": rows}), "step") == (
        True,
        "median 2.0%, max 2.0% over 8 candidates of 1 tables",
    )
    rows[0]["check"]["step_error"], rows[0]["host_bound"] = 0.081, True
    met, text = goal(goals.of_fidelity({"rows": rows}), "step")
    assert not met
    assert text.endswith("; median 2.0%, max 2.0% over the 7 that the device limits")
    assert goal(goals.of_fidelity({"rows": rows[1:]}), "peak")[0] is False


def test_a_gain_over_a_predicted_candidate_is_marked() -> None:
    (run,) = load("h200-olmoe-fused")["runs"]
    assert models.compared(run, "stock") == "1.24x (predicted in part)"
    assert models.compared(run, "largest_without_recompute") == "1.00x"
    del run["comparisons"]
    assert models.compared(run, "stock") is None


def test_strategies_and_reliability_show_what_the_summary_holds() -> None:
    found = recorded("replay")
    ours, row = found["summary"]["strategies"]["bexp"], found["summary"]["calibration"]["reliability"][-1]
    text = search.strategies(found)
    assert cells(text, "`bexp`")[0][1] == f"{ours['trials']['median']:.0f}"
    assert cells(text, "large")[0][0] == "1008"
    assert "3 seeds a table (Optuna's GP 1)" in text
    shown = cells(search.reliability(found), "90 to 99")[0]
    assert shown == [f"{row['num_lines']:.0f}", *(f"{100 * row[of]:.1f}%" for of in ("mean_forecast", "share_true"))]
    found["summary"]["calibration"] = None
    assert search.reliability(found) == ""


def test_transformers_curves_are_relative_and_out_of_memory_is_shown() -> None:
    found = recorded("transformers")
    for row in found["rows"]:
        row["tokens_per_second"] = 1000.0 * row["micro_batch_size"]
        if (row["side"], row["micro_batch_size"]) == ("transformers", 4):
            row["outcome"] = "out_of_memory"
    lines = [line.strip("| ").split(" | ") for line in models.transformers(found).splitlines()]
    assert lines[2][2:] == ["1.00 (1.0)", "2.00 (2.0)", "out of memory", "2"]
