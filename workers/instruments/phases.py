"""The seconds of a trial by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from bexp.explorer.records.measurement import PhaseSeconds


class PhaseClock:
    """A clock that adds up the seconds of each phase of a trial."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._seconds = {"build": 0.0, "warm_up": 0.0, "timed": 0.0}

    @contextmanager
    def phase(self, name: Literal["build", "warm_up", "timed"]) -> Iterator[None]:
        """Count the seconds of a `with` block for the phase, also if the block fails."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - started

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since this object was made."""
        return time.perf_counter() - self._started

    def seconds(self) -> PhaseSeconds:
        """Return the phases so far. Time outside of them counts as `build`, so that their sum is the elapsed time."""
        known = sum(self._seconds.values())
        build = self._seconds["build"] + max(0.0, self.elapsed_seconds - known)
        return PhaseSeconds(build=build, warm_up=self._seconds["warm_up"], timed=self._seconds["timed"])
