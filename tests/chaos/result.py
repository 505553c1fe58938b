"""What campaigns did and found, and the sum of several."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.processes import LEASE_SECONDS, ROOT

CANCEL_LIMIT_SECONDS = 5.0


@dataclass
class Result:
    """What one campaign did, and what it found.

    Attributes:
        cpu_seconds: of the harness and the service, without a PostgreSQL server.
        cold_starts: processes that the interpreter started; the others were forks.
        calls: of the clients, by what they asked for.
        failpoints: how often each edge of a transaction was struck, and how.
        edges: of all transactions that can be reached.
        faults_during_jobs: those of a worker that ran a job, and not of an idle one or of one that was starting.
        cancel_seconds: taken while nothing was hurt.
    """

    commit: str
    database: str
    seed: int
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    cold_starts: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    failpoints: dict[str, int] = field(default_factory=dict)
    edges: int = 0
    faults_during_jobs: int = 0
    jobs: int = 0
    cancelled_jobs: int = 0
    attempts: int = 0
    most_attempts_of_a_job: int = 0
    different_answers: int = 0
    cancel_seconds: list[float] = field(default_factory=list)
    exits: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)


def sum_results(results: Sequence[Result], lost: Sequence[str] = ()) -> dict[str, object]:
    """Return the sum of campaigns as a JSON document; `lost` has a line for each campaign without a result."""
    faults: Counter[str] = Counter()
    exits: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    failpoints: Counter[str] = Counter()
    for result in results:
        faults.update(result.faults)
        exits.update(result.exits)
        calls.update(result.calls)
        failpoints.update(result.failpoints)
    cancels = sorted(seconds for result in results for seconds in result.cancel_seconds)
    violations = [f"seed {result.seed}: {text}" for result in results for text in result.violations] + list(lost)
    if (p99 := percentile(cancels, 0.99)) is not None and p99 > CANCEL_LIMIT_SECONDS:
        violations.append(f"of {len(cancels)} cancels, 1% took {p99:g} s or longer")
    return {
        "commit": read_commit(),
        "database": "+".join(sorted({result.database for result in results})),
        "campaigns": len(results) + len(lost),
        "seeds": [result.seed for result in results],
        "seconds": max((result.seconds for result in results), default=0.0),
        "cpu_seconds": round(sum(result.cpu_seconds for result in results), 1),
        "cold_starts": sum(result.cold_starts for result in results),
        "num_faults": sum(faults.values()),
        "faults": dict(sorted(faults.items())),
        "calls": dict(sorted(calls.items())),
        "edges_struck": len({name.split()[0] for name in failpoints}),
        "edges": max((result.edges for result in results), default=0),
        "failpoints": dict(sorted(failpoints.items())),
        "faults_during_jobs": sum(result.faults_during_jobs for result in results),
        "jobs": sum(result.jobs for result in results),
        "cancelled_jobs": sum(result.cancelled_jobs for result in results),
        "attempts": sum(result.attempts for result in results),
        "most_attempts_of_a_job": max((result.most_attempts_of_a_job for result in results), default=0),
        "different_answers": sum(result.different_answers for result in results),
        "calm_cancels": {
            "num": len(cancels),
            "p50": percentile(cancels, 0.5),
            "p99": p99,
            "max": max(cancels, default=None),
        },
        "exits": dict(sorted(exits.items())),
        "lease_seconds": LEASE_SECONDS,
        "violations": violations,
    }


def result_from(document: dict[str, object]) -> Result:
    """Return what `asdict` made a document of."""
    return Result(**document)  # type: ignore[arg-type]  # a campaign of this version wrote it


def result_as(result: Result) -> dict[str, object]:
    """Return a result as a JSON document."""
    return asdict(result)


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """Return the value that `share` of the sorted values does not exceed; null if there are none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


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
