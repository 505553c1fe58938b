"""Summarises the cells of benchmarks/kernels.py: ours against the others, on the device alone and with the host."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from benchmarks.gemm_contenders import BASELINES, CHOSEN, COUNTED, OURS

ROOFLINE_SECONDS = 2e-4
"""Below this, a cell is dominated by launches and latency, and its share of the roofline says little."""
ROOFLINE_GOALS = {0: 0.7, 512: 0.85}
"""The goal for the share of the roofline, by the least number of tokens per expert."""
LEVEL = 0.99
NUM_ERRORS = 2.0
"""A ratio within this many standard errors of 1 is level."""

Run = dict[str, Any]


def device_seconds(run: Run) -> float:
    """A forward and backward on the device, with launches queued ahead."""
    return float(run["seconds"])


def wall_seconds(run: Run) -> float:
    """The same by the clock, in a loop that launches it; in older results the host's time where that is longer."""
    clock = run.get("clock_seconds")
    return max(float(run["seconds"]), float(run["host_seconds"])) if clock is None else float(clock)


def summarize(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Write the ratios and the share of the roofline into each cell, and return the summary of all cells.

    A ratio is the fastest baseline's time over that of the fastest of ours: `ratio` on the device, `ratio_with_host`
    by wall-clock. `auto_ratio` and `auto_ratio_with_host` are those of `auto`, in cells that have it, and likewise of
    `auto_counted`. `verdict` compares `ratio` with its standard error.
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
        for chosen in (run for run in timed if run["name"] in CHOSEN | COUNTED and others):
            cell[f"{chosen['name']}_ratio"] = min(map(device_seconds, others)) / device_seconds(chosen)
            cell[f"{chosen['name']}_ratio_with_host"] = min(map(wall_seconds, others)) / wall_seconds(chosen)
        if ours:
            cell["roofline_share"] = cell["roofline_seconds"] / min(map(device_seconds, ours))
    ratios = [cell["ratio"] for cell in cells if "ratio" in cell]
    shares = [cell for cell in cells if "roofline_share" in cell and cell["roofline_seconds"] > ROOFLINE_SECONDS]
    return {
        "cells": len(cells),
        "cells_timed": len(ratios),
        **{key.format(""): value for key, value in _ratios(cells, "ratio").items()},
        **{key.format("_with_host"): value for key, value in _ratios(cells, "ratio_with_host").items()},
        **{name: _chosen(cells, name) for name in CHOSEN | COUNTED if any(f"{name}_ratio" in cell for cell in cells)},
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


def _ratios(cells: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The worst, the geometric mean, and how many are level or better; names with a place for the clock's."""
    ratios = [cell[name] for cell in cells if name in cell]
    return {
        "worst_ratio{}": min(ratios, default=None),
        "geometric_mean_ratio{}": geometric_mean(ratios),
        "cells_at_least_0.99{}": sum(ratio >= LEVEL for ratio in ratios),
    }


def _chosen(cells: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The same of a choice of kernels."""
    device, clock = (_ratios(cells, ratio) for ratio in (f"{name}_ratio", f"{name}_ratio_with_host"))
    figures = {key.format(""): value for key, value in device.items()}
    return figures | {key.format("_with_host"): value for key, value in clock.items()}


def verdict(ratio: float, spread: float) -> str:
    """Return `faster`, `slower`, or, if the ratio is within the spread of 1, `level`."""
    if abs(ratio - 1) <= spread:
        return "level"
    return "faster" if ratio > 1 else "slower"


def geometric_mean(ratios: Iterable[float]) -> float | None:
    """Return the geometric mean; None for an empty list."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else None


def _relative_error(run: Run) -> float:
    return float(run["standard_error_seconds"] / run["seconds"])


def _goal(cell: dict[str, Any]) -> float:
    return max(goal for tokens, goal in ROOFLINE_GOALS.items() if cell["tokens"] >= tokens)
