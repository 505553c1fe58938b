"""Curves of throughput over micro-batch, relative to the smallest micro-batch, and the distance between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

REFERENCE = "transformers"
SIDES = (REFERENCE, "whole", "composed")


def summarize(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return, by configuration, relative throughput, standard errors and best micro-batch of each side, compared.

    The curves have only micro-batches that every side ran. `max_deviation` is the largest
    |relative / transformers' relative - 1|. `loss_at_best` is what transformers' model loses if it is trained at the
    side's best micro-batch instead of its own. `speed` is the side's tokens/s over transformers' at each micro-batch.
    """
    found = {}
    for name in dict.fromkeys(str(row["name"]) for row in rows):
        mine = [row for row in rows if row["name"] == name]
        by_side = {
            side: {int(row["micro_batch_size"]): row for row in mine if row["side"] == side and row["outcome"] == "ok"}
            for side in SIDES
            if any(row["side"] == side for row in mine)
        }
        sizes = sorted(set.intersection(*(set(rows) for rows in by_side.values())))
        if sizes:
            found[name] = _compare(by_side, sizes)
    return found


def _compare(by_side: Mapping[str, Mapping[int, Mapping[str, Any]]], sizes: Sequence[int]) -> dict[str, Any]:
    tokens = {side: {m: float(rows[m]["tokens_per_second"]) for m in sizes} for side, rows in by_side.items()}
    curves = {side: {m: found[m] / found[sizes[0]] for m in sizes} for side, found in tokens.items()}
    best = {side: max(sizes, key=found.__getitem__) for side, found in tokens.items()}
    compared = {}
    if REFERENCE in curves:
        reference, theirs = curves[REFERENCE], tokens[REFERENCE]
        for side in (side for side in curves if side != REFERENCE):
            compared[side] = {
                "max_deviation": max(abs(curves[side][m] / reference[m] - 1) for m in sizes),
                "loss_at_best": 1 - theirs[best[side]] / theirs[best[REFERENCE]],
                "speed": {str(m): tokens[side][m] / theirs[m] for m in sizes},
            }
    return {
        "base_micro_batch_size": sizes[0],
        "curves": {side: _named(curve) for side, curve in curves.items()},
        "standard_errors": {
            side: _named({m: curves[side][m] * _relative_error(rows, m, sizes[0]) for m in sizes})
            for side, rows in by_side.items()
            if all("standard_error_seconds" in rows[m] for m in sizes)
        },
        "best": best,
        "against_transformers": compared,
    }


def _relative_error(rows: Mapping[int, Mapping[str, Any]], size: int, base: int) -> float:
    """Return the standard error of a point: that of two independent timings, or 0 if the point is 1 by definition."""
    if size == base:
        return 0.0
    return math.hypot(*(rows[m]["standard_error_seconds"] / rows[m]["micro_step_seconds"] for m in (size, base)))


def _named(curve: Mapping[int, float]) -> dict[str, float]:
    """Return `data` with keys as they are in JSON."""
    return {str(size): value for size, value in curve.items()}
