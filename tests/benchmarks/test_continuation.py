from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.continuation import begin
from benchmarks.environment import write_results

FRESH: dict[str, Any] = {
    "environment": {"date": "2026-02-02", "packages": {"torch": "2.11.0", "fastapi": "1"}},
    "hardware": {"device_name": "a", "versions": {"cudnn": "9.1", "driver": None}, "launch_seconds": 1.0},
    "options": {"sizes": [1, 2], "quick": False},
    "rows": [],
}


def _begin(path: Path, **changes: Any) -> dict[str, Any]:
    return begin(path, FRESH | changes, same=("options", "limits"))


def test_nothing_is_continued_where_there_is_no_file(tmp_path: Path) -> None:
    assert _begin(tmp_path / "x.json") == FRESH


def test_what_is_recorded_is_kept_and_the_day_added(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    recorded = FRESH | {"environment": {"date": "2026-01-01", "packages": {"torch": "2.11.0"}}, "rows": [1, 2]}
    path.write_text(json.dumps(recorded))
    found = _begin(
        path,
        hardware=FRESH["hardware"] | {"launch_seconds": 2.0},
        shared=[],
        options=FRESH["options"] | {"sizes": (1, 2)},
    )
    assert found["rows"] == [1, 2]
    assert found["environment"]["date"] == "2026-01-01"
    assert found["hardware"]["launch_seconds"] == 1.0
    assert found["shared"] == [], "what an earlier version lacks"
    assert len(found["continued"]) == 1
    path.write_text(json.dumps(found))
    assert len(_begin(path)["continued"]) == 2
    del recorded["hardware"], recorded["options"]
    path.write_text(json.dumps(recorded))
    assert _begin(path)["options"] == FRESH["options"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"options": {"sizes": [1], "quick": False}}, r"options.sizes \[1, 2\] instead of \[1\]\. Remove"),
        ({"options": {"quick": False}}, r"options.sizes \[1, 2\] instead of none"),
        ({"environment": {"packages": {"torch": "2.12.0"}}}, r'packages.torch "2.11.0" instead of "2.12.0"'),
        ({"hardware": FRESH["hardware"] | {"device_name": "b"}}, 'hardware.device_name "a" instead of "b"'),
        ({"hardware": FRESH["hardware"] | {"versions": {"cudnn": "9.2", "driver": None}}}, "hardware.versions.cudnn"),
    ],
)
def test_another_run_is_refused_with_what_differs(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(FRESH))
    with pytest.raises(ValueError, match=reason):
        _begin(path, **changes)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": []}'])
def test_a_file_without_results_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="cannot be continued"):
        _begin(path)


def test_results_without_the_kernels_digest_are_of_earlier_kernels(tmp_path: Path) -> None:
    write_results(tmp_path / "run.json", {"environment": {}, "rows": [1]})
    fresh = {"environment": {}, "kernels": "today", "rows": []}
    with pytest.raises(ValueError, match='kernels null instead of "today"'):
        begin(tmp_path / "run.json", fresh, same=("kernels",))
