"""Throughput of MoE layers relative to dense ones of the same active FLOPs, by the device's time and by wall-clock."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.moe_contenders import DENSE

CLOCKS = {"relative_to_dense": "seconds", "device_relative_to_dense": "device_seconds"}
"""By wall-clock (the larger of host and device) and by the device alone: the name of the ratio, and its time."""


GRAPH = " graph"
"""What the name of a contender ends in that is replayed as a CUDA graph."""


def compare_with_dense(rows: list[dict[str, Any]]) -> None:
    """Write both ratios into each row that was timed, against the faster dense layer for as many tokens.

    CUDA graphs are compared with dense layers that are graphs, too.
    """
    for ratio, seconds in CLOCKS.items():
        best: dict[tuple[Any, ...], float] = {}
        for row in rows:
            if row["backend"].removesuffix(GRAPH) in DENSE and seconds in row:
                best[_tokens(row)] = min(best.get(_tokens(row), math.inf), row[seconds])
        for row in rows:
            row.pop(ratio, None)
            if seconds in row and _tokens(row) in best:
                row[ratio] = best[_tokens(row)] / row[seconds]


def _tokens(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["kind"], row["top_k"], row["micro_batch_size"], row["backend"].endswith(GRAPH)
