"""transformers' own classes and Trainer: composed steps, recommendations, and what `bexp.apply` changes."""

from __future__ import annotations

from typing import Any

from benchmarks.docs.results import GIB, Row, table
from benchmarks.real_trainers import best_of


def compositions(result: Row) -> str:
    """A micro-step composed of its parts against the whole model's."""
    return table(
        result["compositions"],
        {
            "model": lambda row: row["model"],
            "micro-batch": lambda row: row["micro_batch_size"],
            "sequence": lambda row: row["seq_length"],
            "whole": lambda row: f"{1e3 * row['whole_seconds']:.1f} ms",
            "composed time": lambda row: f"{row['composed_seconds'] / row['whole_seconds'] - 1:+.1%}",
            "composed activations": lambda row: (
                f"{row['composed_activation_bytes'] / row['whole_activation_bytes'] - 1:+.1%}"
            ),
        },
    )


def trainers(result: Row) -> str:
    """What the Trainer reached: stock at its best, as recommended, and with our loss and experts."""
    return table(
        result["models"],
        {
            "model": lambda row: row["model"],
            "stock, its best": lambda row: _run(best_of(row["sweep"])),
            "as recommended": lambda row: _run(best_of(row["recommended"])),
            "over stock": lambda row: _over(row, "recommended"),
            "with chunked loss and our experts": lambda row: _run(best_of(row.get("applied", []))),
            "over stock ": lambda row: _over(row, "applied"),
            "submit to answer": lambda row: (
                f"{row['exploration']['wall_seconds']:.0f} s" if row["exploration"]["wall_seconds"] else None
            ),
        },
    )


def _run(run: dict[str, Any] | None) -> str | None:
    if run is None:
        return None
    return (
        f"m={run['micro_batch_size']}: {run['tokens_per_second'] / 1e3:.1f}k tokens/s, "
        f"{run['peak_reserved_bytes'] / GIB:.1f} GiB"
    )


def _over(row: Row, runs: str) -> str | None:
    ours, stock = best_of(row.get(runs, [])), best_of(row["sweep"])
    if ours is None or stock is None:
        return None
    return f"{ours['tokens_per_second'] / stock['tokens_per_second']:.2f}x"
