"""The sections of the README, from small recorded runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from benchmarks.moe_contenders import DENSE
from benchmarks.readme import results as files
from benchmarks.readme.attention import attention_choice, bta
from benchmarks.readme.kernels import grouped_gemm, variable_gemm
from benchmarks.readme.layers import moe_layer
from benchmarks.readme.recomputation import recomputation
from benchmarks.readme.results import load, measured_on
from benchmarks.readme.sections import SECTIONS, fill

RECORDED = Path(__file__).parent / "recorded"
RENDERERS: dict[str, Callable[[dict[str, Any], str], str]] = {
    "grouped-gemm": grouped_gemm,
    "variable-gemm": variable_gemm,
    "moe-layer": moe_layer,
    "bta": bta,
    "attention-choice": attention_choice,
}
EMPTY = "".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in SECTIONS)


def _recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())
    return found


def _cells(text: str, label: str) -> list[list[str]]:
    """Of every table row that begins with this label."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [line[1:] for line in lines if line[0] == label]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(files, "RESULTS", tmp_path)
    for name in ("log", "explorations", "fidelity", "explorations-fused"):
        monkeypatch.setitem(SECTIONS, name, str)
    return tmp_path


@pytest.mark.parametrize("name", RENDERERS)
def test_a_section_appears_with_its_file(name: str, results: Path) -> None:
    assert fill(EMPTY) == EMPTY
    (results / f"h200-{name}.json").write_text(json.dumps(_recorded(name)))
    text = RENDERERS[name](_recorded(name), f"h200-{name}")
    assert fill(EMPTY) == EMPTY.replace(f"<!-- {name} -->\n", f"<!-- {name} -->\n{text}")
    assert fill(fill(EMPTY)) == fill(EMPTY)
    assert f"--out benchmarks/results/h200-{name}.json`" in text
    assert f"Measured on {'NVIDIA H200' if name in {'grouped-gemm', 'moe-layer'} else ''}" in text
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert tables
    assert all(len({line.count(" | ") for line in lines}) == 1 for lines in tables)


def test_the_full_run_replaces_the_quick_one(results: Path) -> None:
    (results / "h200-moe-layer-quick.json").write_text(json.dumps(_recorded("moe-layer")))
    assert "--quick" in fill(EMPTY)
    (results / "h200-moe-layer.json").write_text(json.dumps(_recorded("moe-layer")))
    assert "--quick" not in fill(EMPTY)


def test_a_missing_section_is_an_error() -> None:
    with pytest.raises(ValueError, match="no section bta"):
        fill(EMPTY.replace("<!-- bta -->", ""))


def test_grouped_gemm_shows_the_ratio_and_counts_the_wrong() -> None:
    found = _recorded("grouped-gemm")
    few, many = (
        next(c for c in found["cells"] if (c["tokens"], c["distribution"]) == (tokens, "uniform"))
        for tokens in (16, 2048)
    )
    text = grouped_gemm(found, "x")
    assert _cells(text, "16")[0][0] == f"{few['ratio']:.2f}"
    assert _cells(text, "2048")[0][0] == f"{many['ratio']:.2f} ({many['roofline_share']:.0%})"
    assert "Wrong results: none." in text
    assert f"In {len(found['cells'])} of {found['summary']['cells_timed']} cells the host takes longer" in text
    assert "at 8192^3 without any pause (672 TFLOP/s, 1485 MHz, 692 of 700 W)" in text
    many["runs"][-1]["outcome"] = "wrong"
    del few["ratio"]
    text = grouped_gemm(found, "x")
    assert f"Wrong results: {many['runs'][-1]['name']}." in text
    assert _cells(text, "16")[0][0] == "-"


def test_variable_gemm_shows_rates_and_outcomes() -> None:
    found = _recorded("variable-gemm")
    uneven = "(64, 1024, 512, 8, 8) uneven"
    names = [*found["contenders"]["baselines"], *found["contenders"]["ours"]]
    for row in found["runs"]:
        if (row["case"], row["contender"]) == (uneven, "loop"):
            row["training"] |= {"flops_per_second": 512.4e12}
    limited = deepcopy([row for row in found["runs"] if row["case"] == uneven][::2])
    for row in limited:
        row["limit_bytes"] = 16 << 30
        if row["contender"] == "bmm":
            row["training"] = {"outcome": "out_of_memory", "reason": "no"}
            row["forward"] = {"outcome": "ok"}
        if row["contender"] == "loop":
            row["training"] = row["forward"] = {"outcome": "operands_exceed_limit"}
    text = variable_gemm(found | {"runs": found["runs"] + limited}, "x")
    whole, within = _cells(text, uneven)
    assert whole[names.index("loop")] == "512"
    assert whole[names.index("cublas_grouped")] == "unsupported"
    assert within[names.index("bmm")] == "forward"
    assert within[names.index("loop")] == "too large"
    ratio = next(
        row for row in found["summary"]["uneven_over_even"] if (row["contender"], row["of"]) == ("loop", "training")
    )
    assert f"{ratio['ratio']:.2f} {ratio['verdict']}" in _cells(text, "loop")[0]
    assert "left out" not in text
    assert "7 runs were left out" in variable_gemm(found | {"left_out": [{}] * 7}, "x")
    found["summary"]["training"]["outcomes"]["loop"] = {"ok": 2, "wrong": 1, "left_out": 2}
    assert "by back end: loop 2 of 3, bmm 5," in variable_gemm(found, "x")


def test_moe_layer_shows_every_back_end_and_the_fastest() -> None:
    found = _recorded("moe-layer")
    compiled = next(row for row in found["rows"] if (row["micro_batch_size"], row["backend"]) == (64, "fused"))
    dense = [
        row["device_seconds"] for row in found["rows"] if row["backend"] in DENSE and row["micro_batch_size"] == 64
    ]
    timed = {"device_seconds": min(dense) / 0.9, "host_seconds": 2 * min(dense) / 0.9}
    found["rows"].append(compiled | timed | {"backend": "fused compile"})
    largest, by_size = _cells(moe_layer(found, "x"), "E=128 top_k=1")
    assert largest[1] == "1.00x, 2.03 GiB"
    assert largest[-1].startswith("`fused` 0.90x")
    assert by_size[-1] == "0.90x fused compile (2.0x)"


def test_bta_counts_where_tiles_win() -> None:
    found = _recorded("bta")
    row = found["rows"][1]
    assert row["num_experts"] is not None
    for key in row["best"]:
        row["best"][key]["candidate"]["bta_tile"] = 1 if key.startswith("40GiB") or key.endswith("tiled") else None
    for other in found["rows"][2:]:
        other["best"] = {key: {} for key in other["best"]}
        other["relative_to_dense"] = {}
    row["relative_to_dense"] |= {"40GiB/plain": 0.47, "40GiB/tiled": 0.94, "40GiB/explored": 1.01}
    text = bta(found, "x")
    assert _cells(text, "E=8 top_k=1")[0][0] == "0.47 / 0.94 / 1.01"
    assert _cells(text, "E=8 top_k=2")[0][0] == "- / - / -"
    assert "40 GiB: plain 0.47 to 0.47" in text
    tiling = re.findall(r"the best tiles in (\d) of 2, the recommended in (\d)", text)
    assert tiling == [("1", "1"), ("1", "0"), ("1", "0")]


def test_bta_says_how_many_of_the_models_there_are_and_how_they_were_measured() -> None:
    found = _recorded("bta")
    text = bta(found, "x")
    assert "2 of the 2 models that were asked for are in the table. Measured" in text
    assert "`python -m benchmarks.bta --out" in text
    found["shape"] |= {"top_k": [1, 2, 4], "experts": ["fused", "loop"], "attention": "math"}
    text = bta(found, "x")
    assert "2 of the 3 models that were asked for are in the table; there was no time for the others." in text
    assert "`python -m benchmarks.bta --attention math --experts fused loop --out" in text


def test_a_run_that_was_continued_has_all_its_days() -> None:
    found = _recorded("bta")
    found["environment"]["date"] = "2026-01-01T12:00:00"
    assert measured_on(found).endswith(", 2026-01-01.")
    days = ["2026-01-01T13:00:00", "2026-01-03T09:00:00"]
    assert measured_on(found | {"continued": days}).endswith(", 2026-01-01 and 2026-01-03, in 3 runs.")


def test_attention_choice_says_how_far_the_picks_are() -> None:
    found = _recorded("attention-choice")
    cell = next(cell for cell in found["cells"] if (cell["seq_length"], cell["kind"]) == (128, "MQA"))
    cell["picked"] = "flash"
    cell["verdict"]["block"]["ratio"], cell["verdict"]["core"]["ratio"] = 1.0234, None
    found["summary"]["block"] = {"within": 3, "share_within": 0.75, "worst_ratio": 1.0234}
    text = attention_choice(found, "x")
    assert _cells(text, "D=16 MQA")[0][1] == "flash 1.023, -"
    assert "3 of 4 picks are within 1% of the fastest by the attention block (worst 1.023)" in text


def test_recomputation_has_a_column_a_model_and_back_end() -> None:
    found = load("h200-recomputation")
    text = recomputation(found, "x")
    row = next(
        row
        for row in found["rows"]
        if row["candidate"]["expert_backend"] == "fused" and row["candidate"]["recompute"] == "projections"
    )
    assert f"{row['bytes_share']:.0%}, {row['step_cost']:+.1%}" == _cells(text, "projections")[0][1]
    assert _cells(text, "experts")[0][2] == "-"  # a dense model has none
