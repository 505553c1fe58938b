"""The generated tables of attention, its recomputation and its sharing, from small recorded runs."""

from __future__ import annotations

from benchmarks.docs import attention, context_parallel
from benchmarks.docs.results import load
from tests.benchmarks.docs.tables import cells, recorded


def test_batch_tiling_counts_where_tiles_win() -> None:
    found = recorded("bta")
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
    assert cells(text, "E=8 top_k=1")[0][0] == "0.47 / 0.94 / 1.01"
    assert cells(text, "E=8 top_k=2")[0][0] == "- / - / -"
    assert cells(text, "80GiB: models whose best tiles where tiling is allowed") == [["1 of 2"]]
    assert cells(text, "80GiB: models for which tiles are recommended") == [["0 of 2"]]


def test_the_choice_of_attention_says_how_far_the_picks_are() -> None:
    found = recorded("attention-choice")
    cell = next(cell for cell in found["cells"] if (cell["seq_length"], cell["kind"]) == (128, "MQA"))
    cell["picked"] = "flash"
    cell["verdict"]["block"]["ratio"], cell["verdict"]["core"]["ratio"] = 1.0234, None
    found["summary"]["block"] = {"within": 3, "share_within": 0.75, "worst_ratio": 1.0234}
    text = attention.attention_choice(found)
    assert cells(text, "D=16 MQA")[0][1] == "flash 1.023, -"
    assert cells(text, "picks within 1% of the fastest, by the attention block") == [["3 of 4, worst 1.023"]]


def test_recomputation_has_a_column_for_each_model_and_back_end() -> None:
    found = load("h200-recomputation")
    row = next(
        row
        for row in found["rows"]
        if row["candidate"]["expert_backend"] == "fused" and row["candidate"]["recompute"] == "projections"
    )
    text = attention.recomputation(found)
    assert f"{row['bytes_share']:.0%}, {row['step_cost']:+.1%}" == cells(text, "projections")[0][1]
    assert cells(text, "experts")[0][2] == "-"  # a dense model has none


def test_a_margin_within_the_spread_reads_level() -> None:
    found = load("h200x4-context-parallel")
    text = context_parallel.attention(found)
    length = found["summary"]["ours_over_peers"][0]["seq_length"]
    margins = {line[0]: line for line in (cells(text, str(length))[-1:])}
    assert margins["zigzag"][-1] == "level"
    goal = "the fastest of ours against the fastest other code"
    assert cells(text, goal)[0][1:] == ["yes", "faster at 1, level at 4, slower at 0 lengths"]
    found["summary"]["ours_over_peers"][0]["verdict"] = "slower"
    assert cells(context_parallel.attention(found), goal)[0][1] == "no"


def test_steps_show_layouts_their_runs_and_what_was_chosen() -> None:
    found = load("h200x4-context-parallel-step")
    cell = found["cells"][0]
    row = next(row for row in cell["layouts"] if row["layout"] == "striped")
    row |= {"num_runs": 2, "spread": 0.034, "contaminated": True}
    cell["runs"][0]["outcome"] = "timed_out"
    text = context_parallel.steps(found | {"left_out": ["S=1"]})
    shown = cells(text, str(cell["seq_length"]))[0]
    assert shown[1] == "2"
    assert "spread 3.4%" in shown[3]
    assert shown[3].endswith("contaminated")
    assert shown[-1] == "4 zigzag, 100.0% of the fastest"
    assert f"Failed: S={cell['seq_length']} ring none: timed_out." in text
    assert "Left out for want of time: S=1." in text
