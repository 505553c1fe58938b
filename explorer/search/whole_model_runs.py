"""The whole models that were timed: how often, what they reached, and their peaks."""

from __future__ import annotations

import math
from collections.abc import Mapping

from bexp.explorer.surrogate.whole_model_noise import WholeModelRun


class WholeModelRuns:
    """The timed whole models of a variant, by row of its table. Runs of a candidate by several trials count together.

    `found` is what the runs of a candidate say together, `peaks` the bytes that its last run needed.
    """

    def __init__(self) -> None:
        self._by_trial: dict[int, dict[int, tuple[float, float]]] = {}
        self._found: dict[int, WholeModelRun] = {}
        self._peaks: dict[int, int] = {}

    @property
    def found(self) -> Mapping[int, WholeModelRun]:
        """What the runs of each candidate say together."""
        return self._found

    @property
    def peaks(self) -> Mapping[int, int]:
        """The peak bytes of each candidate whose runs state them."""
        return self._peaks

    def learn(self, row: int, trial: int, figures: tuple[float, float], peak_bytes: int | None) -> bool:
        """Learn tokens/s and their relative standard error from a trial; returns whether anything is new."""
        runs = self._by_trial.setdefault(row, {})
        runs[trial] = figures
        run = WholeModelRun.of(*zip(*(runs[each] for each in sorted(runs)), strict=True))
        if self._found.get(row) == run and self._peaks.get(row) == peak_bytes:
            return False
        self._found[row] = run
        if peak_bytes is not None:
            self._peaks[row] = peak_bytes
        return True

    def was_run(self, row: int) -> bool:
        """Whether a candidate's whole model has been timed."""
        return row in self._found

    def count(self, row: int) -> int:
        """How often a candidate's whole model has been timed."""
        return len(self._by_trial.get(row, ()))

    def tokens_per_second(self, row: int) -> float | None:
        """What a candidate's whole model has reached, the geometric mean of its runs; null if it was not timed."""
        run = self._found.get(row)
        return None if run is None else math.exp(run.log_tokens)
