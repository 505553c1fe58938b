from __future__ import annotations

import numpy as np
import pytest

from benchmarks.replay.calibration import calibrate
from benchmarks.replay.runs import Line


def lines(number: int, seed: int, truth_of: float = 1.0) -> list[Line]:
    """Confidences spread evenly; what is said with p comes true with `truth_of` x p."""
    rng = np.random.default_rng(seed)
    confidence = rng.integers(0, 100, number)
    return [Line(int(c), bool(rng.random() < truth_of * (c + 0.5) / 100)) for c in confidence]


def test_forecasts_that_come_true_as_often_as_they_say_have_no_error() -> None:
    found = calibrate({"a": lines(20_000, 0)})
    assert found is not None
    assert found["expected_calibration_error"] < 0.02
    assert found["confident_share_true"] == pytest.approx(0.95, abs=0.02)
    assert found["brier"] == pytest.approx(1 / 6, abs=0.01)  # of uniform forecasts: mean p (1 - p)
    assert found["brier_constant"] == pytest.approx(0.25, abs=0.01)
    assert [(row["from"], row["to"]) for row in found["reliability"]][-1] == (90, 99)


def test_overconfidence_is_an_error_of_its_size() -> None:
    found = calibrate({"a": lines(20_000, 0, truth_of=0.5)})
    assert found is not None
    assert found["expected_calibration_error"] == pytest.approx(0.25, abs=0.02)
    assert found["confident_share_true"] == pytest.approx(0.475, abs=0.03)


def test_a_constant_forecaster_has_the_brier_score_of_the_constant() -> None:
    found = calibrate({"a": [Line(49, i < 50) for i in range(100)]})
    assert found is not None
    assert found["brier"] == pytest.approx(found["brier_constant"], abs=1e-4)


def test_intervals_are_over_tables() -> None:
    """Two tables that disagree leave a wide interval, however many lines they have."""
    found = calibrate({"right": [Line(95, True)] * 5000, "wrong": [Line(95, False)] * 5000})
    assert found is not None
    assert found["confident_share_true"] == 0.5
    assert found["intervals_95"]["confident_share_true"] == [0.0, 1.0]
    assert found["num_tables"] == 2


def test_without_lines_there_is_nothing_to_say() -> None:
    assert calibrate({"a": []}) is None
    single = calibrate({"a": [Line(10, False)]})
    assert single is not None
    assert single["confident_share_true"] is None
    assert single["intervals_95"] == {}
