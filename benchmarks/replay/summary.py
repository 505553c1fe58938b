"""From single runs to the columns of the comparison."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.replay.calibration import CONFIDENT, calibrate
from benchmarks.replay.runs import OURS, Run

SMALL_SPACE = 300
MEDIAN_REGRET, P95_REGRET, MAX_REGRET = 0.0005, 0.01, 0.03
EXHAUSTIVE_SHARE = 0.05
SMALL_SPACE_TRIALS = 15
CALIBRATION_ERROR = 0.05
CONFIDENT_SHARE = 0.9


def summarize(runs: Sequence[Run], tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Figures by strategy over all tables, by table and strategy, the calibration, and the goals with what is met."""
    by_strategy = _group(runs, lambda r: r.strategy)
    ours_seconds = {
        name: statistics.median(r.seconds for r in group)
        for name, group in _group(by_strategy.get(OURS, []), lambda r: r.table).items()
    }
    overall = {name: _figures(group, tables, ours_seconds) for name, group in by_strategy.items()}
    by_table = {
        table: {
            name: _figures(some, tables, ours_seconds) for name, some in _group(group, lambda r: r.strategy).items()
        }
        for table, group in _group(runs, lambda r: r.table).items()
    }
    ours = by_strategy.get(OURS, [])
    lines = {
        table: [line for run in of_table for line in run.lines]
        for table, of_table in _group(ours, lambda r: r.table).items()
    }
    calibration = calibrate(lines)
    timed = {t: of_table for t, of_table in lines.items() if _is_timed_whole(tables[t])}
    return {
        "strategies": overall,
        "tables": by_table,
        "calibration": calibration,
        "calibration_of_whole_models": calibrate(timed) if len(timed) < len(lines) else None,
        "goals": _goals(overall, by_table, calibration, tables) if ours else None,
    }


def _figures(
    runs: Sequence[Run], tables: Mapping[str, Mapping[str, Any]], ours_seconds: Mapping[str, float]
) -> dict[str, Any]:
    regrets = [r.regret for r in runs]
    reached = [_seconds_to(r, tables[r.table]["tolerance"]) for r in runs]
    return {
        "num_runs": len(runs),
        "regret": _spread(regrets),
        "regret_mean": statistics.fmean(regrets),
        "num_without_answer": sum(r >= 1.0 for r in regrets),
        "trials": _spread([float(r.num_trials) for r in runs]),
        "seconds": _spread([r.seconds for r in runs]),
        "check_seconds": _spread([r.check_seconds for r in runs]),
        "share_of_exhaustive": _spread([r.seconds / tables[r.table]["exhaustive_seconds"] for r in runs]),
        "out_of_memory": _spread([float(r.num_out_of_memory) for r in runs]),
        "num_unrecorded": sum(r.num_unrecorded for r in runs),
        "share_within_tolerance": statistics.fmean(r.regret <= tables[r.table]["tolerance"] for r in runs),
        "seconds_to_tolerance_median": _median_if_most(reached),
        "seconds_to_confidence_90_median": _median_if_most([_seconds_to_confident(r) for r in runs]),
        "regret_at_our_seconds": _spread(
            [_regret_at(r, ours_seconds[r.table]) for r in runs if r.table in ours_seconds]
        ),
        "wall_seconds_median": statistics.median(r.wall_seconds for r in runs),
    }


def _is_timed_whole(table: Mapping[str, Any]) -> bool:
    """Whether the truth of every feasible candidate is its whole model, which is what a confidence is about."""
    return bool(table.get("num_whole_models", 0) >= table.get("num_feasible", 1))


def _seconds_to_confident(run: Run) -> float | None:
    return next((line.at_seconds for line in run.lines if line.confidence >= CONFIDENT), None)


def _median_if_most(seconds: Sequence[float | None]) -> float | None:
    """The median where most runs came that far."""
    if sum(s is not None for s in seconds) <= len(seconds) / 2:
        return None
    return statistics.median(s if s is not None else float("inf") for s in seconds)


def _goals(
    overall: Mapping[str, Any],
    by_table: Mapping[str, Mapping[str, Any]],
    calibration: Mapping[str, Any] | None,
    tables: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    ours = overall[OURS]
    large = [t for t in by_table if tables[t]["num_candidates"] >= SMALL_SPACE]
    small = [t for t in by_table if tables[t]["num_candidates"] < SMALL_SPACE]
    shares = {t: by_table[t][OURS]["share_of_exhaustive"]["median"] for t in large}
    trials = {t: by_table[t][OURS]["trials"]["median"] for t in small}
    regret = ours["regret"]
    goals: dict[str, Any] = {
        "regret": {
            "found": regret,
            "met": regret["median"] <= MEDIAN_REGRET and regret["p95"] <= P95_REGRET and regret["max"] <= MAX_REGRET,
        },
        "share_of_exhaustive": {"found": shares, "met": all(s <= EXHAUSTIVE_SHARE for s in shares.values())},
        "trials_in_small_spaces": {"found": trials, "met": all(n <= SMALL_SPACE_TRIALS for n in trials.values())},
        "out_of_memory": {"found": ours["out_of_memory"]["median"], "met": ours["out_of_memory"]["median"] <= 1},
        "cheaper_with_equal_or_better_regret": {"found": (rivals := cheaper(by_table)), "met": not rivals},
    }
    if calibration is not None:
        error, share = calibration["expected_calibration_error"], calibration["confident_share_true"]
        goals["expected_calibration_error"] = {"found": error, "met": error <= CALIBRATION_ERROR}
        goals["confident_share_true"] = {"found": share, "met": share is not None and share >= CONFIDENT_SHARE}
        goals["brier_below_constant"] = {
            "found": [calibration["brier"], calibration["brier_constant"]],
            "met": calibration["brier"] < calibration["brier_constant"],
        }
    return goals


def cheaper(by_table: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """`table: strategy` for each that took fewer seconds than ours and has no larger regret, in mean and p95."""
    return [f"{table}: {name}" for table, rivals in by_table_rivals(by_table).items() for name in rivals]


def by_table_rivals(by_table: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """The same by table; a table without any has an empty list."""
    rivals: dict[str, list[str]] = {}
    for table, strategies in by_table.items():
        ours = strategies.get(OURS)
        if ours is None:
            continue
        rivals[table] = [
            name
            for name, other in strategies.items()
            if name != OURS
            and other["regret_mean"] <= ours["regret_mean"]
            and other["regret"]["p95"] <= ours["regret"]["p95"]
            and other["seconds"]["median"] < ours["seconds"]["median"]
        ]
    return rivals


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {
        "median": statistics.median(values),
        "p95": float(np.percentile(values, 95)),
        "max": max(values),
    }


def _seconds_to(run: Run, tolerance: float) -> float | None:
    """When the running choice was first within tolerance, for good."""
    since: float | None = None
    for seconds, regret in run.path:
        if regret > tolerance:
            since = None
        elif since is None:
            since = seconds
    return since


def _regret_at(run: Run, seconds: float) -> float:
    """Of the running choice when that many device seconds were spent."""
    regret = 1.0
    for at, reached in run.path:
        if at > seconds:
            break
        regret = reached
    return regret


def _group(runs: Iterable[Run], key: Any) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups
