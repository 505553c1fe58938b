"""The marked sections of the pages, and when their figures were measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.docs import results, sections
from benchmarks.docs.results import measured_on
from bexp.kernels.experts.auto.digest import kernels_digest
from tests.benchmarks.docs.tables import recorded


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
    found = recorded("bta")
    found["environment"]["date"] = "2026-01-01T12:00:00"
    assert measured_on(found).endswith(", 2026-01-01.\n")
    days = ["2026-01-01T13:00:00", "2026-01-03T09:00:00"]
    assert measured_on(found | {"continued": days}).endswith(", 2026-01-01 and 2026-01-03, in 3 runs.\n")


@pytest.mark.parametrize(
    ("found", "earlier"), [({"kernels": kernels_digest()}, False), ({"kernels": "0"}, True), ({}, True)]
)
def test_a_table_of_earlier_kernels_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: dict[str, Any], earlier: bool
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    (tmp_path / "some.json").write_text(json.dumps(found))
    text = sections.of_kernels(lambda _: "a table\n", "some")
    assert text.startswith("**Earlier kernels.**") is earlier
    assert "a table\n\nRaw rows: `benchmarks/results/some.json`" in text
