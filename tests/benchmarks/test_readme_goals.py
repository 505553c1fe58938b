"""The table of goals and what stands behind it, from small recorded runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from benchmarks.readme import results as files
from benchmarks.readme.cluster import cluster, of_cluster
from benchmarks.readme.goals import goals, of_explorations, of_fidelity, of_replay, of_transformers
from benchmarks.readme.replay import reliability, strategies
from benchmarks.readme.results import RESULTS, load
from benchmarks.readme.sections import OPTIONAL, SECTIONS, fill
from benchmarks.readme.transformers import transformers

RECORDED = Path(__file__).parent / "recorded"
SAMPLES = {"strategies": "replay", "reliability": "replay", "transformers": "transformers"}


def _recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())
    return found


def _found(rows: list[list[str]], what: str) -> str:
    """The measured cell of the goal that begins like this."""
    (cell,) = (row[-1] for row in rows if row[0].startswith(what))
    return cell


def _cells(text: str, label: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {label} |"))
    return line.strip("| ").split(" | ")[1:]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(files, "RESULTS", tmp_path)
    for name in SECTIONS:
        monkeypatch.setitem(SECTIONS, name, str)
    return tmp_path


MARKED = "".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in SECTIONS)


def test_what_readme_does_not_mark_is_not_asked_for(results: Path) -> None:
    for name in SAMPLES.values():
        (results / f"h200-{name}.json").write_text(json.dumps(_recorded(name)))
    assert fill(MARKED) == MARKED


@pytest.mark.parametrize("name", [name for name in OPTIONAL if not name.startswith("context-parallel")])
def test_a_marked_section_is_filled_when_its_results_exist(name: str, results: Path) -> None:
    text = MARKED + f"<!-- {name} -->\nold\n<!-- /{name} -->\n"
    empty = MARKED + f"<!-- {name} -->\n<!-- /{name} -->\n"
    assert fill(text) == empty
    source = SAMPLES.get(name, "replay")
    (results / f"h200-{source}.json").write_text(json.dumps(_recorded(source)))
    for other in ("cpu-cluster.json", "replay-in-flight.json"):
        (results / other).write_text((RESULTS / other).read_text())
    filled = fill(text)
    assert filled != empty
    assert fill(filled) == filled
    blocks = [block.splitlines() for block in filled.split("\n\n") if block.lstrip("<!-/> \n").startswith("|")]
    assert all(len({row.count(" | ") for row in lines if row.startswith("|")}) == 1 for lines in blocks)


def test_trials_side_by_side_say_reached_and_missed(results: Path) -> None:
    assert cluster() == ""
    (results / "cpu-cluster.json").write_text((RESULTS / "cpu-cluster.json").read_text())
    assert cluster().count("\n") == 2 + 2
    found = load("cpu-cluster")
    found["goals"] = {"speed_up": {"found": 1.42, "met": False}, "overhead_seconds": {"found": 0.004, "met": True}}
    rows = of_cluster(found)
    assert _found(rows, "trials a second").startswith("missed: 1.42x")
    assert _found(rows, "overhead") == "reached: 4.0 ms"


@pytest.mark.parametrize("text", ["<!-- gaols -->\n<!-- /gaols -->\n", "<!-- goals -->\n"])
def test_a_wrong_marker_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"README.md has (a section gaols|no section goals)"):
        fill(MARKED + text)


def test_goals_have_the_rows_that_were_measured(results: Path) -> None:
    assert goals() == ""
    name = "h200-recorded-fidelity.json"
    (results / name).write_text((RESULTS / name).read_text())
    assert goals().count("\n") == 2 + 2
    (results / "h200-replay.json").write_text(json.dumps(_recorded("replay")))
    text = goals()
    assert "Brier" in text
    assert "submit to confidence" not in text
    assert "transformers" not in text


def test_replay_says_reached_and_missed() -> None:
    found = _recorded("replay")
    rows = of_replay(found)
    assert _found(rows, "regret") == "reached: median 0.0%, p95 0.0%, max 0.0% over 9 runs on 3 tables"
    share = found["summary"]["tables"]["large"]["bexp"]["share_of_exhaustive"]["median"]
    assert _found(rows, "device seconds") == (
        f"missed: in 0 of 1 tables; median {100 * share:.1f}%, largest {100 * share:.1f}% (large)"
    )
    assert _found(rows, "trials").startswith("reached: in 2 of 2 tables")
    assert _found(rows, "strategies that") == "reached: none over all tables; on single tables: large: deepspeed fast"
    error = found["summary"]["calibration"]["expected_calibration_error"]
    assert _found(rows, "expected").startswith(f"missed: {error:.3f} (")
    assert _found(rows, "Brier").startswith("reached: ")
    goals_found = found["summary"]["goals"]
    goals_found["regret"] = {"found": {"median": 0.0, "p95": 0.014, "max": 0.02}, "met": False}
    goals_found["cheaper_with_equal_or_better_regret"] = {"found": [], "met": True}
    goals_found["share_of_exhaustive"] = {"found": {}, "met": True}
    rows = of_replay(found)
    assert _found(rows, "regret").startswith("missed: median 0.0%, p95 1.4% (missed), max 2.0% over")
    assert _found(rows, "strategies that") == "reached: none over all tables"
    lucky = found["summary"]["strategies"]["largest that fits"]
    lucky["regret"], lucky["regret_mean"] = {"median": 0.0, "p95": 0.0, "max": 0.0}, 0.0
    lucky["seconds"]["median"] = 0.1
    assert _found(of_replay(found), "strategies that") == "missed: largest that fits over all tables"
    assert not [row for row in rows if row[0].startswith("device seconds")], "there is no such table"
    found["summary"]["goals"] = None
    assert of_replay(found) == []


def test_time_to_confidence_is_held_against_the_models_limit() -> None:
    found = load("h200-explorations")
    run = next(r for r in found["runs"] if r["name"] == "olmoe-1b-7b") | {"submit_to_confidence_90_seconds": 31.0}
    qwen = deepcopy(run)
    qwen["request"]["model"] |= {"name": "qwen3-30b-a3b", "num_layers": 8}
    qwen["submit_to_confidence_90_seconds"] = 89.0
    whole = deepcopy(qwen)
    whole["request"]["model"]["num_layers"] = 48
    whole["submit_to_confidence_90_seconds"] = 500.0
    rows = of_explorations({"runs": [run, qwen, whole]})
    assert _found(rows, "submit") == "reached: olmoe-1b-7b 31 s; qwen3-30b-a3b 89 s"
    qwen["submit_to_confidence_90_seconds"] = None
    qwen["trials"][-1]["measurement"]["outcome"] = "out_of_memory"
    assert qwen["trials"][-1]["kind"] == "whole_model"
    rows = of_explorations({"runs": [run, run | {"submit_to_confidence_90_seconds": 61.0}, qwen]})
    assert _found(rows, "submit") == "missed: olmoe-1b-7b 31 s, 61 s; qwen3-30b-a3b never"
    assert _found(rows, "recommended") == "missed: 1 of 3 whole-model runs"
    del run["submit_to_confidence_90_seconds"]
    assert _found(of_explorations({"runs": [run]}), "submit").endswith(" s (to confidence 95)")


def test_fidelity_needs_enough_configurations() -> None:
    rows_of_one: list[dict[str, Any]] = [
        {"name": "a", "check": {"step_error": -0.02, "peak_error": 0.0}} for _ in range(8)
    ]
    found = {"rows": rows_of_one}
    assert _found(of_fidelity(found), "step").startswith("reached: median 2.0%, max 2.0% over 8 configurations of 1")
    found["rows"][0]["check"]["step_error"] = 0.081
    rows = of_fidelity(found)
    assert _found(rows, "step").startswith("missed: median 2.0%, max 8.1%")
    assert _found(rows, "peak").startswith("reached")
    assert _found(of_fidelity({"rows": found["rows"][1:]}), "peak").startswith("missed")
    found["rows"][0]["host_bound"] = True
    assert _found(of_fidelity(found), "step").endswith("; median 2.0%, max 2.0% over the 7 that the device limits")


def test_strategies_stand_side_by_side_and_bexp_by_table() -> None:
    found = _recorded("replay")
    text = strategies(found, "x")
    ours = found["summary"]["strategies"]["bexp"]
    assert _cells(text, "`bexp`")[1] == f"{ours['trials']['median']:.0f}"
    assert _cells(text, "random")[0] == " / ".join(
        f"{100 * found['summary']['strategies']['random']['regret'][of]:.1f}%" for of in ("median", "p95", "max")
    )
    assert _cells(text, "large")[0] == "1008"
    assert "3 seeds a table (Optuna's GP 1)" in text
    assert "3 tables recorded on simulated H200" in text
    del found["summary"]["tables"]["large"]["bexp"]
    assert "| large |" not in strategies(found, "x")


def test_reliability_shows_what_was_said_and_what_was_true() -> None:
    found = _recorded("replay")
    row = found["summary"]["calibration"]["reliability"][-1]
    text = reliability(found, "x")
    assert _cells(text, "90 to 99") == [
        f"{row['num_lines']:.0f}",
        f"{100 * row['mean_forecast']:.1f}%",
        f"{100 * row['share_true']:.1f}%",
    ]
    assert "timed whole (1): expected" in text
    found["summary"]["calibration_of_whole_models"] = None
    assert "timed whole" not in reliability(found, "x")
    found["summary"]["calibration"] = None
    assert reliability(found, "x") == ""


def _curves() -> dict[str, Any]:
    """The sample with times that are known."""
    found = _recorded("transformers")
    speed: dict[str, Callable[[int], float]] = {
        "transformers": lambda m: 1000.0 * m,
        "whole": lambda m: 1000.0 * m * (0.9 if m == 4 else 1.0),
        "composed": lambda m: 1000.0 / m,
    }
    for row in found["rows"]:
        row["tokens_per_second"] = speed[row["side"]](row["micro_batch_size"])
    return found


def test_curves_are_relative_and_say_how_far_they_are_apart() -> None:
    found = _curves()
    text = transformers(found, "x")
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| tiny-llama")]
    assert lines[1][2:] == ["1.00 (1.0)", "2.00 (2.0)", "3.60 (3.6)", "4"]
    assert (
        "tiny-llama: the whole model keeps within 10.0% of transformers' curve, whose model loses 0.0% at micro-batch 4"
    ) in text
    assert "the sum of components keeps within 93.8% of transformers' curve, whose model loses 75.0% at" in text
    assert "(experts `grouped_mm` and `grouped_mm`; both route alike, the busiest expert has up to 1." in text
    assert "keeps within 10.0%" in of_transformers(found)[0][-1]
    for row in found["rows"]:
        if (row["side"], row["micro_batch_size"]) == ("transformers", 4):
            row |= {"outcome": "out_of_memory"}
    assert "| 2.00 (2.0) | out of memory | 2 |" in transformers(found, "x")
    assert of_transformers({"rows": []}) == []
