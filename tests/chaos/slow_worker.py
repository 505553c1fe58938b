"""A worker whose replayed trials take as long as BEXP_CHAOS_TRIAL_SECONDS says: `python -m tests.chaos.slow_worker`.

A recorded table answers in a moment, so that a job is over before a fault strikes it. A real trial takes a while, in
which its worker waits for the profiler.
"""

from __future__ import annotations

import os
import sys
import time

from bexp.explorer.records.measurement import Measurement
from bexp.explorer.records.trial import TrialTask
from bexp.workers.__main__ import main
from bexp.workers.replay.profiler import ReplayProfiler

VARIABLE = "BEXP_CHAOS_TRIAL_SECONDS"


def slow_down(seconds: float) -> None:
    """Have each trial of this process take that much longer."""
    measure_at_once = ReplayProfiler.measure

    def measure(self: ReplayProfiler, task: TrialTask) -> Measurement:
        time.sleep(seconds)
        return measure_at_once(self, task)

    ReplayProfiler.measure = measure  # type: ignore[method-assign]  # as itself, but slower


if __name__ == "__main__":
    slow_down(float(os.environ[VARIABLE]))
    sys.exit(main())
