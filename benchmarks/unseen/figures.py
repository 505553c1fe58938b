"""What searches on unseen devices come to: regret, whether confidences held, and recommendations that do not run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.replay.calibration import CONFIDENT, calibrate
from benchmarks.replay.runs import Line
from benchmarks.unseen.searches import UnseenRun

LARGE_REGRET = 0.03


@dataclass(frozen=True, slots=True)
class Limits:
    """The worst that passes: largest regrets, least share true of lines >= 90, largest calibration error."""

    regret_p95: float
    confident_share_true: float
    expected_calibration_error: float


GATE = Limits(regret_p95=0.01, confident_share_true=0.9, expected_calibration_error=0.06)
REACHED = Limits(regret_p95=0.01, confident_share_true=0.92, expected_calibration_error=0.08)
"""What the search reaches on the first 80 devices of the gate: 0.5%, 97% and 0.07.

A perfectly calibrated search would have an error of 0.05 to 0.06 on so few devices: the lines of one share their truth.
"""


def summarize(runs: Sequence[UnseenRun]) -> dict[str, Any]:
    """Return regret, calibration with every decile, and the share of recommendations that do not run.

    A search without an answer has a regret of 1; `regret_of_answers` leaves it out. `first_confident` and
    `final_confident` are the first line of each search that is confident, and the answers that
    are: one observation a device.

    The bootstrap of the calibration's intervals draws devices, because the lines of one search are nearly one
    observation.
    """
    return {
        "num_runs": len(runs),
        "regret": _spread([run.regret for run in runs]),
        "regret_of_answers": _spread([run.regret for run in runs if not run.is_without_answer]),
        "num_without_answer": sum(run.is_without_answer for run in runs),
        "regret_of_admitted": _spread([run.regret_of_admitted for run in runs]),
        "share_within_tolerance": statistics.fmean(run.within_tolerance for run in runs),
        "mean_final_confidence": statistics.fmean(run.confidence + 0.5 for run in runs) / 100,
        "share_failing_whole": statistics.fmean(run.fails_whole for run in runs),
        "share_with_failed_checks": statistics.fmean(run.num_failed_checks > 0 for run in runs),
        "trials": statistics.median(run.num_trials for run in runs),
        "seconds": statistics.median(run.seconds for run in runs),
        "check_seconds": statistics.median(run.check_seconds for run in runs),
        "first_confident": _confident([line for run in runs if (line := run.first_confident) is not None]),
        "final_confident": _confident([Line(run.confidence, run.within_tolerance) for run in runs]),
        "calibration": calibrate({str(run.seed): run.lines for run in runs}),
    }


def _confident(lines: Sequence[Line]) -> dict[str, float | None]:
    """Return how many of `lines` are confident, what they said, and the share of them that came true."""
    sure = [line for line in lines if line.confidence >= CONFIDENT]
    return {
        "number": len(sure),
        "mean_forecast": statistics.fmean((line.confidence + 0.5) / 100 for line in sure) if sure else None,
        "share_true": statistics.fmean(line.within_tolerance for line in sure) if sure else None,
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": statistics.median(values),
        "p95": float(np.percentile(values, 95)),
        "max": max(values),
        "mean": statistics.fmean(values),
        "share_large": statistics.fmean(value > LARGE_REGRET for value in values),
    }


def misses(figures: Mapping[str, Any], limits: Limits) -> list[str]:
    """Return what is worse than its limit, in words."""
    calibration = figures["calibration"] or {}
    p95, error = figures["regret"]["p95"], calibration.get("expected_calibration_error", 0.0)
    true = calibration.get("confident_share_true")
    messages = []
    if p95 > limits.regret_p95:
        messages.append(f"the 95th percentile of regret is {p95:.2%}, above {limits.regret_p95:.2%}")
    if true is not None and true < limits.confident_share_true:
        messages.append(f"{true:.1%} of the lines >= 90 are true, below {limits.confident_share_true:.0%}")
    if error > limits.expected_calibration_error:
        messages.append(f"the calibration error is {error:.3f}, above {limits.expected_calibration_error:.3f}")
    return messages


def print_figures(figures: Mapping[str, Any]) -> None:
    """Print the figures for a person."""
    regret, calibration = figures["regret"], figures["calibration"]
    parts = ", ".join(f"{name} {regret[name]:.2%}" for name in ("median", "p95", "max", "mean"))
    print(f"{figures['num_runs']} searches on unseen devices in {figures['wall_seconds']:.0f} s; regret {parts}")
    for name, sure in (("first lines", figures["first_confident"]), ("answers", figures["final_confident"])):
        if sure["number"]:
            print(f"{sure['number']} {name} >= 90 said {sure['mean_forecast']:.1%}, true {sure['share_true']:.1%}")
    if calibration is not None:
        sure, error = calibration["confident_share_true"], calibration["expected_calibration_error"]
        print(f"calibration error {error:.3f}; of all lines >= 90 {'-' if sure is None else f'{sure:.1%}'} are true")
