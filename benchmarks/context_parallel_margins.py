"""Summarises the cells of benchmarks/context_parallel.py: margins over the ring and over other implementations.

Every contender is compared with the back end that is fastest for it. Rounds of one contender differ; the spread is the
distance between its fastest and its slowest round. A margin that is no larger than the larger spread of the two reads
`level`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.gemm_summary import verdict

LAYOUTS = ("ring", "striped", "zigzag")
ALONE = "alone"

Row = dict[str, Any]


def summarize(cells: list[Row]) -> Row:
    """Return, by length, striped over ring, and our fastest layout over the fastest other implementation."""
    lengths = sorted({cell["seq_length"] for cell in cells})
    peers = {name for cell in cells for name in cell["timed"]} - {*LAYOUTS, ALONE}
    return {
        "striped_over_ring": [*_margins(cells, lengths, ("striped",), ("ring",))],
        "ours_over_peers": [*_margins(cells, lengths, LAYOUTS, peers)],
    }


def fastest(cells: Iterable[Row], length: int, names: Iterable[str]) -> Row | None:
    """Return the fastest run of these contenders at a length, on any back end; None if there is none."""
    wanted = frozenset(names)
    timed = [
        run | {"name": name, "backend": cell["backend"], "rounds": cell.get("rounds")}
        for cell in cells
        if cell["seq_length"] == length
        for name, run in cell["timed"].items()
        if name in wanted
    ]
    return min(timed, key=lambda run: float(run["seconds"]), default=None)


def _margins(cells: list[Row], lengths: list[int], ours: Iterable[str], others: Iterable[str]) -> Iterator[Row]:
    for length in lengths:
        own, other = fastest(cells, length, ours), fastest(cells, length, others)
        if own is None or other is None:
            continue
        ratio = other["seconds"] / own["seconds"]
        spread = max(own["spread_seconds"], other["spread_seconds"]) / own["seconds"]
        yield {
            "seq_length": length,
            "ours": own["name"],
            "other": other["name"],
            "ratio": ratio,
            "spread": spread,
            "rounds": min(own["rounds"], other["rounds"]) if own["rounds"] and other["rounds"] else None,
            "verdict": verdict(ratio, spread),
        }
