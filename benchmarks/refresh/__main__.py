"""Refreshes the recorded GPU results that are missing, incomplete, or of earlier expert kernels, within a time.

    python -m benchmarks.refresh --dry-run                               # what is missing, in which order it would run
    python -m benchmarks.refresh --minutes 20 [--only NAME ...] [--devices cuda:0,cuda:1]

What is worth most for its expected seconds runs first. The kernels are built before, by as many processes as there are
cores. Each result is measured by a child process with a time limit; one that hangs or fails is reported, and the rest
goes on. A child writes a draft as it goes. The draft takes the place of the recorded file as soon as it has all of
that file's rows, so that no table gets shorter; until then the next run continues it. Then run `python -m
benchmarks.docs`.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.environment import ROOT
from benchmarks.refresh.catalogue import catalogue
from benchmarks.refresh.result import Recorded, in_order
from benchmarks.refresh.run import Refresh

RESULTS = ROOT / "benchmarks" / "results"


def main(arguments: list[str] | None = None, known: Sequence[Recorded] | None = None) -> int:
    """Refresh what there is time for; return 1 if a command failed or ran out of time, and 130 if interrupted."""
    known = catalogue() if known is None else known
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.refresh", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="for all of it (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=[result.name for result in known], metavar="NAME")
    parser.add_argument("--devices", default="cuda:0", help="as cuda:0,cuda:1 (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the recorded files")
    parser.add_argument("--drafts", type=Path, help="folder of incomplete files (default: drafts in that folder)")
    parser.add_argument("--dry-run", action="store_true", help="only say what is missing, in order")
    options = parser.parse_args(arguments)
    end = time.monotonic() + 60 * options.minutes
    asked = [result for result in known if not options.only or result.name in options.only]
    drafts = options.drafts or options.results / "drafts"
    states = [result.state(options.results, drafts) for result in asked]
    todo = in_order(states, 60 * options.minutes)
    for state in (*todo, *(state for state in states if state not in todo)):
        print(state)
    if options.dry_run:
        return 0
    run = Refresh(options.results, drafts, end, options.devices.split(","))
    stopped = False
    try:
        run.run(asked)
    except KeyboardInterrupt:
        stopped = True
    print("\nafter this run:")
    for result in asked:
        note = run.notes.get(result.name)
        print(result.state(options.results, drafts), *(["--", note] if note else []))
    return 130 if stopped else int(any(note != "ended" for note in run.notes.values()))


def end_as_if_interrupted() -> None:
    """Have this process end its children, which have sessions of their own, when it is told to end or hung up on."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)


if __name__ == "__main__":
    end_as_if_interrupted()
    sys.exit(main())
