"""The seconds of a job by phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from bexp.explorer.records.measurement import PhaseSeconds

PHASES = ("process_start", "build", "warm_up", "timed", "messaging", "suggest", "storage")


class JobTimings:
    """Counts seconds from the claim of a job on. The job was queued for `queued_seconds` before.

    What a profiler process does before the claim, such as importing torch, is not counted. A trial inside `suggest`
    counts only as a trial, so that the phases do not overlap.
    """

    def __init__(self, queued_seconds: float) -> None:
        self._queued_seconds = queued_seconds
        self._claimed_at = time.perf_counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._busy_seconds = 0.0

    @contextmanager
    def spend(self, phase: str) -> Iterator[None]:
        """Count the seconds of a `with` block for `phase`, without the trials inside it."""
        assert phase in PHASES
        busy = self._busy_seconds
        started = time.perf_counter()
        try:
            yield
        finally:
            wall = time.perf_counter() - started
            self._seconds[phase] += wall - (self._busy_seconds - busy)

    @contextmanager
    def begin(self) -> Iterator[None]:
        """Count the seconds in which the profiler prepares for the job."""
        started = time.perf_counter()
        try:
            yield
        finally:
            wall = time.perf_counter() - started
            self._busy_seconds += wall
            self._seconds["process_start"] += wall

    def add_trial(self, wall_seconds: float, phases: PhaseSeconds, *, beside_others: bool = False) -> None:
        """Count a trial that took `wall_seconds` here and reports `phases`.

        The process start that a trial reports may have happened before it, so only the part that fits into the wall
        time is counted. A trial that ran beside others took longer than it was waited for; its phases are scaled to the
        waiting time.
        """
        measured = phases.model_dump()
        start = measured.pop("process_start")
        if beside_others and (took := sum(measured.values())) > wall_seconds:
            measured = {phase: seconds * wall_seconds / took for phase, seconds in measured.items()}
        for phase, seconds in measured.items():
            self._seconds[phase] += seconds
        self._seconds["process_start"] += min(start, max(0.0, wall_seconds - sum(measured.values())))
        self._busy_seconds += wall_seconds

    def seconds(self) -> dict[str, float]:
        """Return seconds by phase.

        `queue` is the time before the first claim. `total` is the time since the claim of this lease; the phases and
        `other` add up to it. `profiler_idle` is the part of `total` in which the profiler had nothing to do.
        """
        total = time.perf_counter() - self._claimed_at
        seconds = {"queue": self._queued_seconds, **{phase: self._seconds[phase] for phase in PHASES}}
        seconds["other"] = max(0.0, total - sum(self._seconds.values()))
        seconds["total"] = total
        seconds["profiler_idle"] = max(0.0, total - self._busy_seconds)
        return {name: round(value, 6) for name, value in seconds.items()}
