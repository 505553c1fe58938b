from __future__ import annotations

from typing import Any

import pytest

from benchmarks.curves import summarize

TOKENS = {
    "transformers": {1: 100.0, 2: 150.0, 4: 160.0, 8: 152.0},
    "whole": {1: 200.0, 2: 330.0, 4: 320.0},
    "composed": {1: 200.0, 2: 300.0, 4: 320.0, 8: 300.0},
}


def _rows(name: str = "m") -> list[dict[str, Any]]:
    timed = {"micro_step_seconds": 1.0, "standard_error_seconds": 0.03}
    rows: list[dict[str, Any]] = [
        {"name": name, "side": side, "micro_batch_size": m, "outcome": "ok", "tokens_per_second": t, **timed}
        for side, found in TOKENS.items()
        for m, t in found.items()
    ]
    rows.append({"name": name, "side": "whole", "micro_batch_size": 8, "outcome": "out_of_memory", "reason": "no"})
    return rows


def test_curves_are_compared_where_every_side_ran() -> None:
    found = summarize(_rows())["m"]
    assert found["base_micro_batch_size"] == 1
    assert found["curves"]["whole"] == pytest.approx({"1": 1.0, "2": 1.65, "4": 1.6})
    assert found["best"] == {"transformers": 4, "whole": 2, "composed": 4}
    whole, composed = found["against_transformers"]["whole"], found["against_transformers"]["composed"]
    assert whole["max_deviation"] == pytest.approx(0.1)
    assert whole["loss_at_best"] == pytest.approx(1 - 150 / 160)
    assert whole["speed"] == pytest.approx({"1": 2.0, "2": 2.2, "4": 2.0})
    assert composed["max_deviation"] == composed["loss_at_best"] == 0.0
    assert found["standard_errors"]["whole"] == pytest.approx(
        {"1": 0.0, "2": 1.65 * 0.03 * 2**0.5, "4": 1.6 * 0.0424}, rel=1e-2
    )


def test_what_is_not_there_is_not_compared() -> None:
    rows = [row for row in _rows() if row["side"] != "transformers"]
    assert summarize(rows)["m"]["against_transformers"] == {}
    for row in rows:
        if row["side"] == "whole":
            row["outcome"] = "out_of_memory"
    assert summarize(rows) == {}
    assert list(summarize(_rows("a") + rows + _rows("b"))) == ["a", "b"]
