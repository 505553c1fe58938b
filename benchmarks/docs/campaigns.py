"""Recorded campaigns against the service: faults at random, and fuzzed requests."""

from __future__ import annotations

from benchmarks.docs import results
from benchmarks.docs.results import Row, load, table


def campaigns() -> str:
    """A line for each recorded campaign."""
    paths = [path for pattern in ("chaos-*.json", "fuzz*.json") for path in sorted(results.RESULTS.glob(pattern))]
    if not paths:
        return ""
    return table(
        [load(path.stem) for path in paths],
        {
            "commit": lambda row: f"`{row['commit'][:7]}`",
            "what": _what,
            "how many": _how_many,
            "violations": _violations,
        },
    )


def _what(row: Row) -> str:
    return "fuzzed requests" if "requests" in row else f"faults, {row['database']}, {row['seconds']:.0f} s"


def _how_many(row: Row) -> str:
    if "requests" in row:
        guided = ", guided by new lines" if row["guided_by_new_lines"] else ""
        return f"{row['requests']:,} requests{guided}, the slowest {row['slowest_seconds']:.2f} s"
    return f"{row['num_faults']} faults over {row['jobs']} explorations"


def _violations(row: Row) -> str:
    if "requests" in row:
        return f"{row['num_violations']} server errors" if row["num_violations"] else "none"
    return str(len(row["violations"]) or "none")
