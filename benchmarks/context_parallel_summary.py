"""Summarises the runs of one cell of benchmarks/context_parallel_step.py."""

from __future__ import annotations

import statistics
from typing import Any

from bexp.explorer.spec.candidate import Candidate

RAN = frozenset({"ok", "contaminated"})
"""Outcomes that have a time. Contaminated runs count only if there are no others."""

Row = dict[str, Any]


def key_of(row: Row) -> tuple[int, str | None, str]:
    """Return size, layout and recomputation, which identify a run within a cell."""
    return row["size"], row["layout"], row["recompute"]


def key_of_candidate(candidate: Candidate) -> tuple[int, str | None, str]:
    """Return the same for a candidate."""
    return candidate.context_parallel_size, candidate.context_parallel_layout, candidate.recompute.value


def seconds_once_a_step(whole: Row) -> float:
    """Return a whole model's optimizer seconds, plus those of communication once a step, if they are separate."""
    return float(whole["optimizer_seconds"] + (whole.get("communication_seconds") or 0.0))


def summarize(cell: Row) -> None:
    """Write `layouts` and `choice` of a cell from its runs and its search."""
    keys = dict.fromkeys(key_of(run) for run in cell["runs"] if run["outcome"] in RAN)
    rows = {key: _row(key, [run for run in cell["runs"] if key_of(run) == key]) for key in keys}
    for (size, _, recompute), row in rows.items():
        ring = rows.get((size, "ring", recompute))
        row["speed_over_ring"] = ring["step_seconds"] / row["step_seconds"] if ring and row["layout"] else None
    cell["layouts"] = sorted(rows.values(), key=lambda row: (row["size"], row["layout"] or "", row["recompute"]))
    cell["choice"] = _choice(cell, rows) if cell["search"] is not None else None


def _row(key: tuple[int, str | None, str], runs: list[Row]) -> Row:
    ran = [run for run in runs if run["outcome"] == "ok"] or [run for run in runs if run["outcome"] in RAN]
    size, layout, recompute = key
    seconds = [run["step_seconds"] for run in ran]
    return {
        "size": size,
        "layout": layout,
        "recompute": recompute,
        "num_runs": len(ran),
        "contaminated": all(run["outcome"] == "contaminated" for run in ran),
        "step_seconds": statistics.median(seconds),
        "spread": max(seconds) / min(seconds) - 1,
        "micro_step_seconds": statistics.median(run["whole_model"]["micro_step_seconds"] for run in ran),
        "seconds_once_a_step": statistics.median(seconds_once_a_step(run["whole_model"]) for run in ran),
        "tokens_per_second": statistics.median(run["tokens_per_second"] for run in ran),
        "peak_bytes": max(run["whole_model"]["peak_bytes"] for run in ran),
        "reserved_bytes": max(run["whole_model"]["reserved_bytes"] for run in ran),
    }


def _choice(cell: Row, rows: dict[tuple[int, str | None, str], Row]) -> Row:
    """Compare the explorer's choice with the fastest candidate that was run whole."""
    found = cell["search"]
    fastest = max(rows.values(), key=lambda row: row["tokens_per_second"], default=None)
    choice: Row = {
        "chosen": None,
        "fastest": None if fastest is None else _named(fastest),
        "share_of_best": None,
        "within_tolerance": None,
        "tolerance": found["tolerance"],
        "confidence": found["confidence"],
        "seconds": found["seconds"],
        "composed_error": None,
        "reason": found["reason"],
    }
    if found["candidate"] is None or fastest is None:
        return choice
    candidate = Candidate.model_validate(found["candidate"])
    size, layout, recompute = key_of_candidate(candidate)
    choice["chosen"] = {"size": size, "layout": layout, "recompute": recompute}
    own = rows.get((size, layout, recompute))
    if own is None:
        failed = [run for run in cell["runs"] if key_of(run) == (size, layout, recompute)]
        choice["reason"] = f"{failed[-1]['outcome']}: {failed[-1]['reason']}" if failed else "it was not run whole"
        return choice
    share = own["tokens_per_second"] / fastest["tokens_per_second"]
    return choice | {
        "share_of_best": share,
        "within_tolerance": share >= 1 - found["tolerance"],
        "composed_error": found["tokens_per_second"] / own["tokens_per_second"] - 1,
    }


def _named(row: Row) -> Row:
    return {name: row[name] for name in ("size", "layout", "recompute")}
