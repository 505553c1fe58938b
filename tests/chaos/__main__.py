"""Hurts a service at random and checks what it promises; the result is JSON.

`python -m tests.chaos --minutes 10 [--postgres]` is one campaign. `--rounds 20 --output FILE` runs rounds one after the
other, each of a campaign on either database at once, and adds them to the file.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.chaos.campaign import Plan, run_campaign
from tests.chaos.result import document_of_result, write_document
from tests.chaos.rounds import run_rounds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long faults begin")
    parser.add_argument("--rounds", type=int, help="so many, on both databases; SIGTERM ends them cleanly")
    parser.add_argument("--postgres", action="store_true", help="on PostgreSQL (pgserver) instead of SQLite")
    parser.add_argument("--workers", type=int, default=Plan.num_workers, help="of each campaign")
    parser.add_argument(
        "--fault-seconds", type=float, default=Plan.fault_seconds, help="the mean pause between two faults"
    )
    parser.add_argument(
        "--cold-share", type=float, default=Plan.cold_share, help="of the starts, by the interpreter; others are forks"
    )
    parser.add_argument("--trial-seconds", type=float, default=Plan.trial_seconds, help="how long a trial takes")
    parser.add_argument(
        "--cancels", type=int, default=Plan.num_cancels, help="of each campaign, timed when the faults are over"
    )
    parser.add_argument("--seed", type=int, default=None, help="of the faults; default: the time")
    parser.add_argument("--output", type=Path, help="a file for the JSON; default: standard output")
    options = parser.parse_args()
    plan = Plan(
        seconds=60 * options.minutes,
        seed=int(time.time()) if options.seed is None else options.seed,
        fault_seconds=options.fault_seconds,
        num_workers=options.workers,
        trial_seconds=options.trial_seconds,
        cold_share=options.cold_share,
        num_cancels=options.cancels,
        postgres=options.postgres,
    )
    if options.rounds is None:
        return write_document(document_of_result(run_campaign(plan)), options.output)
    if options.output is None:
        parser.error("--rounds needs --output, the file that they are added to")
    return 1 if run_rounds(options.rounds, plan, options.output) else 0


if __name__ == "__main__":
    sys.exit(main())
