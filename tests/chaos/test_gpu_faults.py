"""The bookkeeping of device faults; the faults themselves need minutes and a device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chaos import faulty_profiler
from tests.chaos.gpu_rounds import Round, add_up, append_round, next_kind, read_rounds


@pytest.mark.parametrize("times", [1, 2])
def test_a_fault_strikes_at_its_place_after_as_many_passes_and_as_often_as_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    struck: list[str] = []
    file = tmp_path / "fault.json"
    monkeypatch.setenv(faulty_profiler.VARIABLE, str(file))
    monkeypatch.setitem(faulty_profiler.FAULTS, "hang", struck.append)
    faulty_profiler.strike("component", "cuda:1")
    file.write_text(json.dumps({"kind": "hang", "place": "component", "trials": 1, "passes": 2, "times": times}))
    for place in ("component", "reply", "component", "timed", "component"):
        faulty_profiler.strike(place, "cuda:1")
    assert struck == []
    for _ in range(3):
        faulty_profiler.strike("component", "cuda:1")
    assert struck == ["cuda:1"] * times
    assert not file.exists()


def test_rounds_are_summed_up_over_calls(tmp_path: Path) -> None:
    file = tmp_path / "rounds.jsonl"
    assert read_rounds(file) == []
    rounds = [
        Round("hang", "c", "cuda:0", struck=True, used_bytes=5),
        Round("cancel", "c", "cuda:0", struck=True, cancel_seconds=7.0, violations=["3 MiB are not free again"]),
        Round("cancel", "c", "cuda:0", struck=True, cancel_seconds=9.0, violations=["a"], dropped="judged wrongly"),
    ]
    for done in rounds:
        append_round(file, done)
    found = add_up(read_rounds(file))
    assert found["rounds"] == {"cancel": 1, "hang": 1}
    assert found["dropped"] == {"cancel: judged wrongly": 1}
    assert next_kind(["cancel"], read_rounds(file), 2) == "cancel"
    assert found["violations"] == ["cancel: 3 MiB are not free again", "of 1 cancels, 1% took 7 s or longer"]


def test_the_next_fault_is_the_one_that_struck_least_often_and_none_is_tried_without_end() -> None:
    hang, leak = Round("hang", "c", "cpu", struck=True), Round("leak", "c", "cpu")
    kinds = ["hang", "leak", "cancel"]
    assert next_kind(kinds, [], 2) == "hang"
    assert next_kind(kinds, [hang], 2) == "leak"
    assert next_kind(kinds, [hang, leak], 2) == "cancel"
    assert next_kind(kinds[:2], [hang, leak, leak], 2) == "leak"
    assert next_kind(kinds[:2], [hang, leak, leak, leak, leak], 2) == "hang"
    assert next_kind(kinds[:2], [hang, hang, leak, leak, leak, leak], 2) is None
