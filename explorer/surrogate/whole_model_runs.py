"""The whole models that were timed: the number of runs, their tokens/s, and their noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bexp.explorer.cost.composition import Floats

RUN_STD = {"cuda": 0.003, "cpu": 0.01}
"""Standard deviation between runs of one whole model, beyond its stated standard error and the noise of its blocks.

A device drifts by about as much between trials. The two runs of each of two candidates on an H100 differed by 0.3 and
1.0% (benchmarks/results/h100-explorations.json).
"""
NOISE_RUNS = 1
"""The weight of the prior of their noise, in repeated whole models.

The prior is the noise of the blocks as if all of them were slow or fast together. In a whole model a part of it
averages out, and only repeated runs show how much.
"""
UNSTEADY = 10.0
"""The ratio of the variance of repeated whole models to the expected one from which the device counts as unsteady.

By chance two runs of one whole model show as much about once in 100,000 times.
"""


@dataclass(frozen=True, slots=True)
class WholeModelRun:
    """The runs of a candidate's whole model.

    `log_tokens` is the mean of the logarithms of their tokens/s, and `squares` the sum of their squared distances
    from it. `standard_error` is the relative one that a run states.
    """

    log_tokens: float
    standard_error: float
    number: int = 1
    squares: float = 0.0

    @classmethod
    def of(cls, tokens_per_second: Sequence[float], standard_errors: Sequence[float]) -> WholeModelRun:
        """Return the summary of several runs of one candidate."""
        logs = np.log(tokens_per_second)
        stated = float(np.sqrt(np.mean(np.square(standard_errors))))
        return cls(float(logs.mean()), stated, len(logs), float(((logs - logs.mean()) ** 2).sum()))


class WholeModelRuns:
    """The timed whole models of a variant, by row of its table. All runs of a candidate count together."""

    def __init__(self) -> None:
        self._by_trial: dict[int, dict[int, tuple[float, float]]] = {}
        self._runs: dict[int, WholeModelRun] = {}
        self._peaks: dict[int, int] = {}

    @property
    def by_row(self) -> Mapping[int, WholeModelRun]:
        """The summary of the runs of each candidate."""
        return self._runs

    @property
    def peaks(self) -> Mapping[int, int]:
        """The peak bytes of each candidate in its last run that states them."""
        return self._peaks

    def learn(self, row: int, trial: int, figures: tuple[float, float], peak_bytes: int | None) -> None:
        """Learn tokens/s and their relative standard error from a trial."""
        runs = self._by_trial.setdefault(row, {})
        runs[trial] = figures
        run = WholeModelRun.of(*zip(*(runs[each] for each in sorted(runs)), strict=True))
        self._runs[row] = run
        if peak_bytes is not None:
            self._peaks[row] = peak_bytes

    def was_run(self, row: int) -> bool:
        """Return whether a candidate's whole model has been timed."""
        return row in self._runs

    def count(self, row: int) -> int:
        """Return how often a candidate's whole model has been timed."""
        return len(self._by_trial.get(row, ()))

    def tokens_per_second(self, row: int) -> float | None:
        """Return the tokens/s of a candidate's whole model, the geometric mean of its runs; None without a run."""
        run = self._runs.get(row)
        return None if run is None else math.exp(run.log_tokens)


class WholeModelNoise:
    """The noise of whole models on a kind of device, from the J candidates that were run whole.

    `blocks_std_J` is the relative standard deviation between runs of their steps by the noise of their blocks.
    """

    def __init__(self, device_kind: str, runs: Sequence[WholeModelRun], blocks_std_J: Floats) -> None:
        stated_J = np.array([run.standard_error for run in runs])
        self._number_J = np.array([run.number for run in runs], dtype=np.float64)
        self._variance_J: Floats = stated_J**2 + RUN_STD[device_kind] ** 2 + blocks_std_J**2
        squares = float((np.array([run.squares for run in runs]) / self._variance_J).sum())
        self._share = (NOISE_RUNS + squares) / (NOISE_RUNS + float((self._number_J - 1).sum()))

    @property
    def unsteadiness(self) -> float:
        """The ratio of the noise to the expected noise, where it is surely larger; else 1.

        Blocks are measured on the same device, a moment earlier or later, so their composition varies as well.
        """
        return math.sqrt(self._share) if self._share >= UNSTEADY else 1.0

    @property
    def of_means(self) -> Floats:
        """Relative standard deviations of the means of the runs, shape (J,)."""
        return np.asarray(np.sqrt(self._variance_J / self._number_J * self._share))
