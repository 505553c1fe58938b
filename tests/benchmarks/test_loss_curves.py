from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import loss_curves
from benchmarks.loss_curves import _visible, compare, main

STEPS = 60
FIRST = [4.0 - 0.02 * step for step in range(STEPS)]
SECOND = [loss + 0.05 * (1 if step % 20 < 10 else -1) for step, loss in enumerate(FIRST)]


@pytest.mark.parametrize(
    ("patched", "within"),
    [
        (FIRST, True),
        ([loss + 0.04 for loss in FIRST], True),
        ([loss + 0.06 for loss in FIRST], False),
        ([loss + (0.1 if step >= 50 else 0.0) for step, loss in enumerate(FIRST)], False),
        ([loss + (0.1 if step < 10 else 0.0) for step, loss in enumerate(FIRST)], True),
        ([float("nan")] * STEPS, False),
    ],
)
def test_a_curve_is_within_the_spread_of_the_seeds_on_average_and_at_its_end(
    patched: list[float], within: bool
) -> None:
    found = compare(FIRST, SECOND, patched)
    assert found["within"] is within
    assert (found["spread"], found["largest_spread"]) == (pytest.approx(0.05), pytest.approx(0.05))


def test_each_expert_implementation_is_a_row_and_one_that_fails_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def train(*_: Any, seed: int, settings: dict[str, Any] | None = None) -> dict[str, Any]:
        name = (settings or {}).get("experts")
        if name == "bexp_broken":
            raise RuntimeError("no kernel")
        curve = SECOND if seed else FIRST
        return {"losses": [loss + (name == "bexp_wrong") for loss in curve], "seconds": 1.0, "applied": name}

    monkeypatch.setattr(loss_curves, "train", train)
    out, names = tmp_path / "curves.json", ["bexp_fused", "bexp_broken", "bexp_wrong"]
    asked = ["--models", "olmoe", "--out", str(out), "--device", "cpu", "--implementations"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert main([*asked, names[0]]) == 0
    assert main([*asked, *names]) == 1, "one is not within the spread"
    written = json.loads(out.read_text())
    rows = written["models"]
    assert [(key, row.get("within"), row.get("error")) for key, row in rows.items()] == [
        ("olmoe, bexp_fused", True, None),
        ("olmoe, bexp_broken", None, "RuntimeError: no kernel"),
        ("olmoe, bexp_wrong", False, None),
    ]
    assert [run["applied"] for run in rows["olmoe, bexp_fused"]["runs"]] == [None, None, "bexp_fused"]
    assert {"commit", "device"} <= written.keys()


def test_a_process_sees_the_named_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [_visible(device) for device in ("cpu", "cuda", "cuda:0", "cuda:3")] == ["", "0", "0", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert [_visible(device) for device in ("cpu", "cuda:1")] == ["", "GPU-b"]
