"""From single runs to the columns of the comparison."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.replay.calibration import calibrate
from benchmarks.replay.runs import OURS, Run


def summarize(runs: Sequence[Run], tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Figures by strategy over all tables, by table and strategy, and the calibration.

    The truth of a table that was timed whole is what a confidence is about; such tables are calibrated apart, too.
    """
    by_table = {
        table: {name: _figures(some, tables) for name, some in _group(group, lambda run: run.strategy).items()}
        for table, group in _group(runs, lambda run: run.table).items()
    }
    ours = [run for run in runs if run.strategy == OURS]
    lines = {
        table: [line for run in of_table for line in run.lines]
        for table, of_table in _group(ours, lambda run: run.table).items()
    }
    whole = {t for t, table in tables.items() if table.get("num_whole_models", 0) >= table.get("num_feasible", 1)}
    timed = {table: of_table for table, of_table in lines.items() if table in whole}
    return {
        "strategies": {name: _figures(group, tables) for name, group in _group(runs, lambda run: run.strategy).items()},
        "tables": by_table,
        "calibration": calibrate(lines),
        "calibration_of_whole_models": calibrate(timed) if len(timed) < len(lines) else None,
        "cheaper_with_equal_or_better_regret": cheaper(by_table),
    }


def _figures(runs: Sequence[Run], tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    regrets = [run.regret for run in runs]
    return {
        "num_runs": len(runs),
        "regret": _spread(regrets),
        "regret_mean": statistics.fmean(regrets),
        "num_without_answer": sum(regret >= 1.0 for regret in regrets),
        "trials": _spread([float(run.num_trials) for run in runs]),
        "seconds": _spread([run.seconds for run in runs]),
        "check_seconds": _spread([run.check_seconds for run in runs]),
        "share_of_exhaustive": _spread([run.seconds / tables[run.table]["exhaustive_seconds"] for run in runs]),
        "out_of_memory": _spread([float(run.num_out_of_memory) for run in runs]),
        "share_within_tolerance": statistics.fmean(run.regret <= tables[run.table]["tolerance"] for run in runs),
    }


def cheaper(by_table: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """`table: strategy` for each that took fewer seconds than ours and has no larger regret, in mean and p95."""
    return [
        f"{table}: {name}"
        for table, strategies in by_table.items()
        for name, other in strategies.items()
        if (ours := strategies.get(OURS)) is not None
        and name != OURS
        and other["regret_mean"] <= ours["regret_mean"]
        and other["regret"]["p95"] <= ours["regret"]["p95"]
        and other["seconds"]["median"] < ours["seconds"]["median"]
    ]


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "p95": float(np.percentile(values, 95)), "max": max(values)}


def _group(runs: Iterable[Run], key: Callable[[Run], str]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups
