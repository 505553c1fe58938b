"""What a campaign did and found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.processes import ROOT

CANCEL_LIMIT_SECONDS = 5.0


@dataclass
class Result:
    """What one campaign did, and what it found.

    Attributes:
        calls: of the clients, by what they asked for.
        failpoints: how often each edge of a transaction was struck, and how.
        edges: of all transactions that can be reached.
        faults_during_jobs: those of a worker that took or ran a job, not of one that was idle or starting.
        faults_during_calls: those at the transactions of the API that a client waited for.
        measured_jobs: whose trials a profiler process measured, and not a recorded table.
        cancel_seconds: taken while nothing was hurt.
    """

    commit: str
    database: str
    seed: int
    seconds: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    failpoints: dict[str, int] = field(default_factory=dict)
    edges: int = 0
    faults_during_jobs: int = 0
    faults_during_calls: int = 0
    jobs: int = 0
    measured_jobs: int = 0
    cancel_seconds: list[float] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)


def document_of_result(result: Result) -> dict[str, Any]:
    """Return the result of a campaign as a JSON document."""
    document = asdict(result)
    cancels = document.pop("cancel_seconds")
    document["violations"] += late_cancels(cancels)
    return {**document, "num_faults": sum(result.faults.values()), "calm_cancels": spread(cancels)}


def late_cancels(seconds: Sequence[float]) -> list[str]:
    """Return a violation if one of a hundred cancels took longer than is promised."""
    p99 = percentile(sorted(seconds), 0.99)
    if p99 is None or p99 <= CANCEL_LIMIT_SECONDS:
        return []
    return [f"of {len(seconds)} cancels, 1% took {p99:g} s or longer"]


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """Return the value that `share` of the sorted values does not exceed; null if there are none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """Return how many times there are, their median, the 99th percentile and the longest (0 of none)."""
    ordered = sorted(seconds)
    figures = {"p50": percentile(ordered, 0.5), "p99": percentile(ordered, 0.99), "max": max(ordered, default=None)}
    return {"num": len(ordered)} | {name: round(value or 0.0, 4) for name, value in figures.items()}


def above(what: str, found: float, limit: float) -> list[str]:
    """Return a violation if a figure is above its limit."""
    return [f"{what} is {found:.3g}, and the limit {limit:g}"] if found > limit else []


def read_commit() -> str:
    """Return BEXP_COMMIT, or the commit of the checkout, where there is one."""
    if named := os.environ.get("BEXP_COMMIT"):
        return named
    with suppress(OSError):  # there may be no git
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() or "unknown"
    return "unknown"


def write_document(document: Mapping[str, Any], output: Path | None) -> int:
    """Write a result as JSON, to standard output without a path; return the exit status, 1 after a violation."""
    text = json.dumps(document, indent=1) + "\n"
    if output is None:
        sys.stdout.write(text)
    else:
        output.write_text(text)
    return 1 if document["violations"] else 0
