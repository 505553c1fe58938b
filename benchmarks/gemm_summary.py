"""Summarises the cells of benchmarks/kernels.py: ours against the others, on the device alone and with the host."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from benchmarks.gemm_contenders import BASELINES, OURS

ROOFLINE_SECONDS = 2e-4
"""Below this, a cell is dominated by launches and latency, and its share of the roofline says little."""
ROOFLINE_GOALS = {0: 0.7, 512: 0.85}
"""The goal for the share of the roofline, by the least number of tokens per expert."""
NUM_ERRORS = 2.0
"""A ratio within this many standard errors of 1 is level."""

Run = dict[str, Any]


def device_seconds(run: Run) -> float:
    """A forward and backward on the device, with launches queued ahead."""
    return float(run["seconds"])


def wall_seconds(run: Run) -> float:
    """The same in a loop that launches it: the host's time where that is longer."""
    return max(float(run["seconds"]), float(run["host_seconds"]))


def summarize(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Write the ratios and the share of the roofline into each cell, and return the summary of all cells.

    A ratio is the fastest baseline's time over that of the fastest of ours: `ratio` on the device, `ratio_with_host`
    by wall-clock. `verdict` compares `ratio` with its standard error.
    """
    for cell in cells:
        timed = [run for run in cell["runs"] if run["outcome"] == "ok"]
        ours = [run for run in timed if run["name"] in OURS]
        others = [run for run in timed if run["name"] in BASELINES]
        if ours and others:
            own, other = min(ours, key=device_seconds), min(others, key=device_seconds)
            cell["ratio"] = device_seconds(other) / device_seconds(own)
            cell["ratio_error"] = cell["ratio"] * math.hypot(_relative_error(own), _relative_error(other))
            cell["verdict"] = verdict(cell["ratio"], NUM_ERRORS * cell["ratio_error"])
            cell["ratio_with_host"] = min(map(wall_seconds, others)) / min(map(wall_seconds, ours))
        if ours:
            cell["roofline_share"] = cell["roofline_seconds"] / min(map(device_seconds, ours))
    ratios = [cell["ratio"] for cell in cells if "ratio" in cell]
    with_host = [cell["ratio_with_host"] for cell in cells if "ratio" in cell]
    shares = [cell for cell in cells if "roofline_share" in cell and cell["roofline_seconds"] > ROOFLINE_SECONDS]
    return {
        "cells": len(cells),
        "cells_timed": len(ratios),
        "worst_ratio": min(ratios, default=None),
        "geometric_mean_ratio": geometric_mean(ratios),
        "cells_at_least_0.99": sum(ratio >= 0.99 for ratio in ratios),
        "worst_ratio_with_host": min(with_host, default=None),
        "geometric_mean_ratio_with_host": geometric_mean(with_host),
        "cells_at_least_0.99_with_host": sum(ratio >= 0.99 for ratio in with_host),
        "verdicts": {
            word: sum(cell.get("verdict") == word for cell in cells) for word in ("faster", "level", "slower")
        },
        "roofline_cells": len(shares),
        "roofline_cells_reached": sum(cell["roofline_share"] >= _goal(cell) for cell in shares),
        "sustained_roofline_cells_reached": sum(
            cell["roofline_share"] * cell["sustained_roofline_seconds"] / cell["roofline_seconds"] >= _goal(cell)
            for cell in shares
        ),
    }


def verdict(ratio: float, spread: float) -> str:
    """Return `faster`, `slower`, or, if the ratio is within the spread of 1, `level`."""
    if abs(ratio - 1) <= spread:
        return "level"
    return "faster" if ratio > 1 else "slower"


def geometric_mean(ratios: Iterable[float]) -> float | None:
    """Return the geometric mean; null for an empty list."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else None


def _relative_error(run: Run) -> float:
    return float(run["standard_error_seconds"] / run["seconds"])


def _goal(cell: dict[str, Any]) -> float:
    return max(goal for tokens, goal in ROOFLINE_GOALS.items() if cell["tokens"] >= tokens)
