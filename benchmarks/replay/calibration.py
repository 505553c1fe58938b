"""Whether confidences are right: reliability, expected calibration error, Brier score.

A line with confidence c forecasts the probability (c + 0.5) / 100, because c is rounded down. The constant forecaster
always forecasts the share that came true, known in hindsight; no constant does better. Intervals are bootstrapped over
tables, because the lines of one table are not independent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.replay.runs import Line

NUM_BINS = 10
CONFIDENT = 90
RESAMPLES = 2000
INTERVAL = (2.5, 97.5)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Sums:
    """Of one table's lines, by bin of ten points: number, forecasts, outcomes; and over all lines the squared errors.

    `confident` and `confident_true` count the lines of at least CONFIDENT, and those of them that came true.
    """

    number: Floats
    forecast: Floats
    true: Floats
    squared_error: float
    confident: float
    confident_true: float

    @classmethod
    def of(cls, lines: Sequence[Line]) -> _Sums:
        confidence = np.array([line.confidence for line in lines], dtype=np.int64)
        forecast = (confidence + 0.5) / 100
        outcome = np.array([line.within_tolerance for line in lines], dtype=np.float64)
        bins = confidence * NUM_BINS // 100
        sure = confidence >= CONFIDENT
        return cls(
            _by_bin(bins, np.ones(len(bins))),
            _by_bin(bins, forecast),
            _by_bin(bins, outcome),
            float(((forecast - outcome) ** 2).sum()),
            float(sure.sum()),
            float(outcome[sure].sum()),
        )


def calibrate(lines_by_table: Mapping[str, Sequence[Line]]) -> dict[str, Any] | None:
    """Return the calibration of the lines of all tables; None if there are none."""
    sums = [_Sums.of(lines) for lines in lines_by_table.values() if lines]
    if not sums:
        return None
    calibration: dict[str, Any] = dict(_figures(sums))
    resampled: dict[str, list[float]] = {}
    rng = np.random.default_rng(0)
    for _ in range(RESAMPLES if len(sums) > 1 else 0):
        chosen = [sums[i] for i in rng.integers(len(sums), size=len(sums))]
        for key, value in _figures(chosen).items():
            if value is not None:
                resampled.setdefault(key, []).append(value)
    calibration["intervals_95"] = {key: [float(p) for p in np.percentile(v, INTERVAL)] for key, v in resampled.items()}
    calibration["num_tables"] = len(sums)
    calibration["reliability"] = _reliability(sums)
    return calibration


def _figures(sums: Sequence[_Sums]) -> dict[str, float | None]:
    number_B = np.sum([s.number for s in sums], axis=0)
    forecast_B = np.sum([s.forecast for s in sums], axis=0)
    true_B = np.sum([s.true for s in sums], axis=0)
    number = float(number_B.sum())
    rate = float(true_B.sum()) / number
    confident = sum(s.confident for s in sums)
    return {
        "num_lines": number,
        "expected_calibration_error": float(np.abs(forecast_B - true_B).sum()) / number,
        "brier": sum(s.squared_error for s in sums) / number,
        "brier_constant": rate * (1 - rate),
        "share_true": rate,
        "num_confident_lines": confident,
        "confident_share_true": sum(s.confident_true for s in sums) / confident if confident else None,
    }


def _by_bin(bins: npt.NDArray[np.int64], values: Floats) -> Floats:
    return np.asarray(np.bincount(bins, values, NUM_BINS), dtype=np.float64)


def _reliability(sums: Sequence[_Sums]) -> list[dict[str, float]]:
    number_B = np.sum([s.number for s in sums], axis=0)
    forecast_B = np.sum([s.forecast for s in sums], axis=0)
    true_B = np.sum([s.true for s in sums], axis=0)
    width = 100 // NUM_BINS
    return [
        {
            "from": width * b,
            "to": width * b + width - 1,
            "num_lines": float(number_B[b]),
            "mean_forecast": float(forecast_B[b] / number_B[b]),
            "share_true": float(true_B[b] / number_B[b]),
        }
        for b in range(NUM_BINS)
        if number_B[b]
    ]
