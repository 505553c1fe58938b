"""Gains on tables that hold the whole truth, and the picture of a search on one."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import picture
from benchmarks.gains import gains, summarize
from benchmarks.replay.ground_truth import GroundTruth
from bexp.explorer.answers.alternatives import alternative_rows
from bexp.explorer.records.recommendation import Role
from bexp.explorer.search.explore import explore
from bexp.workers.replay.profiler import RecordedDevice, VirtualClock
from tests.explorer.alternatives import other_of

TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "tables" / "olmoe-zipf.jsonl"


@pytest.fixture(scope="module")
def truth() -> GroundTruth:
    return GroundTruth.read(TABLE)


def test_the_best_is_compared_with_what_people_would_train_with(truth: GroundTruth) -> None:
    found = gains(truth)
    plain, largest, stock = (found[f"over_{what}"] for what in ("largest_without_recompute", "largest", "stock"))
    assert plain["candidate"]["recompute"] == "none"
    assert plain["gain"] == pytest.approx(1)
    assert largest["candidate"]["micro_batch_size"] > plain["candidate"]["micro_batch_size"]
    assert largest["gain"] > 1.05
    assert stock["candidate"]["expert_backend"] in {"grouped_mm", "bmm"}
    assert summarize([found])["over_largest_without_recompute"]["num_level"] == 1
    assert summarize([found])["over_stock"]["num_level"] == 0


def test_an_answer_compares_with_stock_candidates_that_were_not_fully_measured(truth: GroundTruth) -> None:
    clock = VirtualClock()
    device = RecordedDevice(truth.recording, seed=0, clock=clock)
    found = None
    for step in explore(truth.request, truth.report, device, clock=clock, prune=lambda *_: truth.prune):
        found = step.recommendation or found
    assert found is not None
    stock, plain = (other_of(found, role) for role in (Role.STOCK, Role.LARGEST_WITHOUT_RECOMPUTE))
    assert stock.ratio == pytest.approx(gains(truth)["over_stock"]["gain"], rel=0.03)
    assert plain.candidate.recompute == "none"
    assert plain.ratio == pytest.approx(1, abs=0.01)
    if stock.predicted:
        assert any("predicted in part" in row.text for row in alternative_rows(found))


def test_the_picture_is_that_of_the_recorded_table() -> None:
    text = picture.PICTURE.read_text()
    assert text.startswith("<svg")
    assert "micro_batch_size=6" in text
    assert "◀&#160;best&#160;so&#160;far" in text
