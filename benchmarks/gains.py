"""The gain of the best candidate over what people would train with instead, on tables that are measured in full.

    python -m benchmarks.gains benchmarks/results/tables/*.jsonl --out benchmarks/results/h200-gains.json

Each table holds the measured throughput of every legal candidate, so nothing here is predicted. The best is compared
with three alternatives: the largest micro-batch that fits without tiling and recomputation, the largest that fits with
any settings (each with its fastest settings), and the best that needs neither our kernels nor tiling.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import describe_environment, write_results
from benchmarks.replay.ground_truth import GroundTruth
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.recompute import Recompute

LEVEL = 0.005
"""Gains below this are counted as none: runs of one candidate differ by about as much."""

NEAR = 0.01


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    rows = [gains(GroundTruth.read(path)) for path in options.tables]
    summary = summarize(rows)
    write_results(options.out, {"environment": describe_environment(), "rows": rows, "summary": summary})
    for what, gained in summary.items():
        print(f"{what}: {gained}")
    return 0


def gains(truth: GroundTruth) -> dict[str, Any]:
    """Return the best candidate of a table and its throughput relative to each alternative; None if there is none."""
    hardware = truth.report

    def is_plain(c: Candidate) -> bool:
        return c.bta_tile is None and c.recompute is Recompute.NONE

    def is_stock(c: Candidate) -> bool:
        return c.bta_tile is None and hardware.is_stock(c.attention_backend, c.expert_backend)

    return {
        "name": truth.name,
        "device": hardware.hardware.describe(),
        "best": truth.table.candidates[int(truth.tokens_C.argmax())].model_dump(mode="json"),
        "over_largest_without_recompute": _over(truth, is_plain, largest=True),
        "over_largest": _over(truth, lambda _: True, largest=True),
        "over_stock": _over(truth, is_stock, largest=False),
    }


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return, for each alternative, how many tables have it, on how many nothing is gained, median and largest gain.

    For dense models also what the largest micro-batch without recomputation loses: on tables where that is less than a
    hundredth, and on any.
    """
    gains: dict[str, Any] = {}
    for what in ("over_largest_without_recompute", "over_largest", "over_stock"):
        ratios = [row[what]["gain"] for row in rows if row[what] is not None]
        gains[what] = {
            "num_tables": len(ratios),
            "num_level": sum(ratio <= 1 + LEVEL for ratio in ratios),
            "median": statistics.median(ratios) if ratios else None,
            "max": max(ratios, default=None),
        }
    dense = [row["over_largest_without_recompute"] for row in rows if row["best"]["expert_backend"] is None]
    lost = [1 - 1 / over["gain"] for over in dense if over is not None]
    near = [share for share in lost if share < NEAR]
    gains["lost_by_largest_if_dense"] = {
        "num_tables": len(lost),
        "num_near": len(near),
        "max_near": max(near, default=None),
        "max": max(lost, default=None),
    }
    return gains


def _over(truth: GroundTruth, allowed: Callable[[Candidate], bool], *, largest: bool) -> dict[str, Any] | None:
    fits = [(c, float(t)) for c, t in zip(truth.table.candidates, truth.tokens_C, strict=True) if t > 0 and allowed(c)]
    if largest:
        size = max((c.micro_batch_size for c, _ in fits), default=0)
        fits = [(c, t) for c, t in fits if c.micro_batch_size == size]
    if not fits:
        return None
    candidate, tokens_per_second = max(fits, key=lambda fit: fit[1])
    return {"candidate": candidate.model_dump(mode="json"), "gain": truth.best / tokens_per_second}


if __name__ == "__main__":
    sys.exit(main())
