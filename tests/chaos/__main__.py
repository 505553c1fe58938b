"""`python -m tests.chaos --minutes 10 [--postgres] [--output FILE]`: one campaign, its result as JSON."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from tests.chaos.campaign import run_campaign


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--postgres", action="store_true", help="on PostgreSQL (pgserver) instead of SQLite")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=None, help="of the faults; default: the time")
    parser.add_argument("--output", type=Path, help="a file for the JSON; default: standard output")
    options = parser.parse_args()
    seed = int(time.time()) if options.seed is None else options.seed
    result = run_campaign(60 * options.minutes, postgres=options.postgres, seed=seed, num_workers=options.workers)
    text = json.dumps(result.as_json(), indent=1) + "\n"
    if options.output is None:
        sys.stdout.write(text)
    else:
        options.output.write_text(text)
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
