"""Where the seconds of a trial go."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from explorer.records.measurement import PhaseSeconds


class PhaseClock:
    """Adds up the seconds of each phase of a trial."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._seconds = {"build": 0.0, "warm_up": 0.0, "timed": 0.0}

    @contextmanager
    def phase(self, name: Literal["build", "warm_up", "timed"]) -> Iterator[None]:
        """What runs within belongs to the phase, whether it fails or not."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - started

    @property
    def elapsed_seconds(self) -> float:
        """Since the clock was made."""
        return time.perf_counter() - self._started

    def seconds(self) -> PhaseSeconds:
        """The phases so far; what belongs to none of them counts as set-up, so that nothing is lost."""
        known = sum(self._seconds.values())
        build = self._seconds["build"] + max(0.0, self.elapsed_seconds - known)
        return PhaseSeconds(build=build, warm_up=self._seconds["warm_up"], timed=self._seconds["timed"])
