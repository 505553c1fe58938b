"""Hurts a service at random and checks what it promises; the result is JSON.

`python -m tests.chaos --minutes 10 [--postgres]` is one campaign, `--campaigns 24` are so many side by side.
`--rounds 100 --output FILE` runs campaigns one after the other on both databases, and adds each to the file.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.chaos.campaign import Plan, run_campaign
from tests.chaos.result import result_as, sum_results, write_document
from tests.chaos.rounds import run_rounds
from tests.chaos.side_by_side import run_campaigns


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long faults begin")
    parser.add_argument("--campaigns", type=int, default=1, help="so many at once; each keeps about two cores busy")
    parser.add_argument("--rounds", type=int, help="so many one after the other; SIGTERM ends them early and cleanly")
    parser.add_argument("--postgres", action="store_true", help="on PostgreSQL (pgserver) instead of SQLite")
    parser.add_argument("--workers", type=int, default=2, help="of each campaign")
    parser.add_argument("--fault-seconds", type=float, default=1.6, help="the mean pause between two faults")
    parser.add_argument(
        "--cold-share", type=float, default=0.05, help="of the starts, by the interpreter; the others are forks"
    )
    parser.add_argument("--trial-seconds", type=float, default=0.15, help="how long a trial takes")
    parser.add_argument("--cancels", type=int, default=5, help="of each campaign, timed when the faults are over")
    parser.add_argument("--seed", type=int, default=None, help="of the faults; default: the time")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--raw", action="store_true", help=argparse.SUPPRESS)  # what is summed up
    parser.add_argument("--output", type=Path, help="a file for the JSON; default: standard output")
    options = parser.parse_args()
    seed = int(time.time()) if options.seed is None else options.seed
    plan = Plan(
        seconds=60 * options.minutes,
        seed=seed,
        fault_seconds=options.fault_seconds,
        num_workers=options.workers,
        trial_seconds=options.trial_seconds,
        cold_share=options.cold_share,
        num_cancels=options.cancels,
        postgres=options.postgres,
        port=options.port,
    )
    if options.rounds is not None:
        if options.output is None:
            parser.error("--rounds needs --output, the file that they are added to")
        return 1 if run_rounds(options.rounds, plan, options.output) else 0
    lost: list[str] = []
    if options.campaigns == 1:
        results = [run_campaign(plan)]
    else:
        passed = [*("--workers", str(options.workers), "--fault-seconds", str(options.fault_seconds))]
        passed += ["--trial-seconds", str(options.trial_seconds)]
        passed += ["--cold-share", str(options.cold_share), "--cancels", str(options.cancels)]
        passed += ["--postgres"] if options.postgres else []
        results, lost = run_campaigns(options.campaigns, seed, options.minutes, passed)
    document = result_as(results[0]) if options.raw else sum_results(results, lost)
    return write_document(document, options.output)


if __name__ == "__main__":
    sys.exit(main())
