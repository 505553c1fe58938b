"""Puts known faults into the product, one at a time, and says who notices: `python -m tests.chaos.mutants --minutes 2`.

Each is judged by the tests that concern it, and by a campaign of so many minutes on each database where it changes
anything. The product without a fault must pass them all. Status 1: a fault was not noticed, or there is a false alarm.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.interposition import environment_with
from tests.chaos.mutations import MUTATIONS
from tests.chaos.processes import ROOT
from tests.chaos.result import read_commit, write_document
from tests.chaos.side_by_side import REST_SECONDS

UNCHANGED = "unchanged"
DATABASES = ("SQLite", "PostgreSQL")
TRIAL_SECONDS = 0.05
"""So short that explorations often end, which a fault may be about."""

SHOWN = 3
"""So many of the violations are kept, and so many of the failed tests."""


@dataclass(frozen=True)
class Options:
    """How long a campaign hurts, and how hard."""

    minutes: float
    fault_seconds: float
    seed: int


def judge_by_tests(name: str) -> dict[str, Any]:
    """Run the tests that concern a mutation, or those of all without one."""
    known = MUTATIONS.get(name)
    tests = known.tests if known is not None else sorted({test for each in MUTATIONS.values() for test in each.tests})
    environment = environment_with(known.changes if known is not None else (), os.environ)
    command = [sys.executable, "-m", "pytest", "-rfE", "-p", "no:cacheprovider", "-x" if known else "-q", *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return {"status": done.returncode, "tests": list(tests), "failed": failed[:SHOWN]}


def judge_by_campaign(name: str, database: str, options: Options) -> dict[str, Any]:
    """Run a campaign against a mutation."""
    with tempfile.TemporaryDirectory(prefix="bexp-mutant-") as folder:
        output = Path(folder) / "result.json"
        command = [sys.executable, "-m", "tests.chaos", "--raw", "--output", str(output), "--cancels", "2"]
        command += ["--trial-seconds", str(TRIAL_SECONDS)]
        command += ["--minutes", str(options.minutes), "--fault-seconds", str(options.fault_seconds)]
        command += ["--seed", str(options.seed), *(["--postgres"] if database == "PostgreSQL" else [])]
        command += ["--mutation", name] if name in MUTATIONS else []
        limit = 60 * options.minutes + REST_SECONDS
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit)
            found = json.loads(output.read_text())
        except (OSError, subprocess.TimeoutExpired) as error:
            why = str(error) if isinstance(error, subprocess.TimeoutExpired) else done.stderr[-400:]
            return {"database": database, "no_result": why, "violations": 0}
    violations = found["violations"]
    told = {name: found[name] for name in ("seconds", "jobs", "attempts", "seed")}
    told |= {"faults": sum(found["faults"].values()), "calls": sum(found["calls"].values())}
    told["edges_struck"] = len({edge.split()[0] for edge in found["failpoints"]})
    return {"database": database, **told, "violations": len(violations), "first": violations[:SHOWN]}


def judge(names: Sequence[str], options: Options, lanes: int) -> dict[str, Any]:
    """Return what became of each mutation, with the product without one first."""
    commit, everything = read_commit(), [UNCHANGED, *names]
    with ThreadPoolExecutor(lanes) as pool:
        tested = {name: pool.submit(judge_by_tests, name) for name in everything}
        hurt = {
            name: [
                pool.submit(judge_by_campaign, name, database, options)
                for database in (MUTATIONS[name].databases if name in MUTATIONS else DATABASES)
            ]
            for name in everything
        }
        rows: dict[str, dict[str, Any]] = {}
        for name in everything:
            campaigns = [campaign.result() for campaign in hurt[name]]
            rows[name] = {"tests": tested[name].result(), "campaigns": campaigns, "found_by": []}
            rows[name]["found_by"] += ["tests"] * (rows[name]["tests"]["status"] == 1)
            rows[name]["found_by"] += [f"campaign on {each['database']}" for each in campaigns if each["violations"]]
            print(f"{name}: {', '.join(rows[name]['found_by']) or 'not noticed'}", file=sys.stderr, flush=True)
    unchanged = rows.pop(UNCHANGED)
    alarms = [f"without a mutation: {each}" for each in unchanged["campaigns"] if each["violations"]]
    alarms += [f"without a mutation: {unchanged['tests']}"] if unchanged["tests"]["status"] else []
    by = {
        who: sum(any(who in each for each in row["found_by"]) for row in rows.values()) for who in ("tests", "campaign")
    }
    return {
        "commit": commit,
        "minutes_of_a_campaign": options.minutes,
        "machine": {"cores": os.cpu_count(), "lanes": lanes},
        "num": len(rows),
        "num_found": sum(bool(row["found_by"]) for row in rows.values()),
        "num_found_by": by,
        "unchanged": unchanged,
        "mutations": {name: {"text": MUTATIONS[name].text, **row} for name, row in rows.items()},
        "violations": alarms + [f"nobody noticed {name}" for name, row in rows.items() if not row["found_by"]],
    }


def main() -> int:
    """Judge, print who noticed what, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="MUTATION", help=f"default: all: {', '.join(MUTATIONS)}")
    parser.add_argument("--minutes", type=float, default=2.0, help="of faults, of each campaign")
    parser.add_argument("--fault-seconds", type=float, default=0.4, help="the mean pause between two faults")
    parser.add_argument("--lanes", type=int, default=2 * (os.cpu_count() or 1), help="so many at once")
    parser.add_argument("--seed", type=int, default=1, help="of the faults")
    parser.add_argument("--output", type=Path, help="a file for the JSON; default: standard output")
    options = parser.parse_args()
    if unknown := set(options.names) - MUTATIONS.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    how = Options(options.minutes, options.fault_seconds, options.seed)
    found = judge(options.names or list(MUTATIONS), how, options.lanes)
    print(f"{found['num_found']} of {found['num']} found", file=sys.stderr)
    return write_document(found, options.output)


if __name__ == "__main__":
    sys.exit(main())
