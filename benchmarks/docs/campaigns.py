"""Recorded campaigns against the service: faults at random, fuzzed requests, and times that are promised."""

from __future__ import annotations

from collections import Counter

from benchmarks.docs import results
from benchmarks.docs.results import Row, find, load, table

ROUNDS = "chaos-rounds"
FIGURE = "chaos-figure-"
DEVICE_FAULTS = "h100-gpu-faults"


def campaigns() -> str:
    """A line for each recorded campaign, and for the rounds of each commit and database; then the sum of all faults."""
    paths = [path for pattern in ("chaos-*.json", "fuzz*.json") for path in sorted(results.RESULTS.glob(pattern))]
    single = [load(path.stem) for path in paths if path.stem != ROUNDS and not path.stem.startswith(FIGURE)]
    rows = [*single, *_rounds()]
    if not rows:
        return ""
    found = table(
        rows,
        {
            "commit": lambda row: f"`{row['commit'][:7]}`",
            "what": _what,
            "how many": _how_many,
            "violations": _violations,
        },
    )
    return found + _sum([row for row in rows if "requests" not in row])


def figures() -> str:
    """A line for each recorded figure."""
    rows = [load(path.stem) for path in sorted(results.RESULTS.glob(f"{FIGURE}*.json"))]
    columns = {
        "commit": lambda row: f"`{row['commit'][:7]}`",
        "figure": lambda row: row["figure"],
        "database": lambda row: row["database"],
        "load on cores": lambda row: f"{row['machine']['load'][0]:.0f} on {row['machine']['cores']}",
        "found": _found,
        "violations": _violations,
    }
    return table(rows, columns) if rows else ""


def device_faults() -> str:
    """A line for each fault of a device, and what all of them came to."""
    found = find(DEVICE_FAULTS)
    if found is None:
        return ""
    rows = [{"kind": kind, "rounds": rounds} for kind, rounds in found["rounds"].items() if kind in found["struck"]]
    columns = {
        "fault": lambda row: row["kind"].replace("_", " "),
        "explorations": lambda row: str(row["rounds"]),
        "struck": lambda row: str(found["struck"][row["kind"]]),
        "violations": lambda row: str(
            sum(text.startswith(f"{row['kind']}:") for text in found["violations"]) or "none"
        ),
    }
    commits = ", ".join(f"`{commit[:7]}`" for commit in found["commits"])
    total = (
        f"Together {sum(found['struck'].values())} faults, {len(found['violations']) or 'no'} violations; {commits}."
    )
    return f"{table(rows, columns)}\n{total}\n"


def _rounds() -> list[Row]:
    """The rounds, summed up by commit and database."""
    recorded = find(ROUNDS)
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in recorded["rounds"] if recorded is not None else []:
        groups.setdefault((row["commit"], row["database"]), []).append(row)
    return [
        {
            "commit": commit,
            "database": database,
            "violations": [text for row in rows for text in row["violations"]],
            **{
                name: sum(row[name] for row in rows) for name in ("seconds", "num_faults", "faults_during_jobs", "jobs")
            },
            "faults": sum((Counter(row["faults"]) for row in rows), Counter()),
        }
        for (commit, database), rows in groups.items()
    ]


def _sum(rows: list[Row]) -> str:
    faults: Counter[str] = sum((Counter(row["faults"]) for row in rows), Counter())
    kinds = ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in sorted(faults.items()))
    broken = sum(len(row["violations"]) for row in rows) or "no"
    return f"\nTogether {faults.total():,} faults ({kinds}), {broken} violations.\n"


def _what(row: Row) -> str:
    return "fuzzed requests" if "requests" in row else f"faults, {row['database']}, {row['seconds']:,.0f} s"


def _how_many(row: Row) -> str:
    if "requests" in row:
        guided = ", guided by new lines" if row["guided_by_new_lines"] else ""
        return f"{row['requests']:,} requests{guided}, the slowest {row['slowest_seconds']:.2f} s"
    during = f", {row['faults_during_jobs']:,} of them on a running one" if "faults_during_jobs" in row else ""
    return f"{row['num_faults']:,} faults over {row['jobs']:,} explorations{during}"


def _violations(row: Row) -> str:
    if "requests" in row:
        others = [text for text in row["violations"] if not text.startswith("status ")]
        errors = row["num_violations"] - len(others)
        return "; ".join([f"{errors} server errors"] * (errors > 0) + others) or "none"
    return str(len(row["violations"]) or "none")


def _found(row: Row) -> str:
    if "followers" in row:
        events = f"{row['events']:,} events for {row['followers']:,} followers"
        return f"{events}, {row['disconnects']:,} disconnects, {row['restarts']} kills of the API"
    return f"{row['num']} times: median {row['p50']:.3g} s, p99 {row['p99']:.3g} s, longest {row['max']:.3g} s"
