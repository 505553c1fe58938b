"""Comparison of two measured candidates: which is faster, and how many more runs it would take to know.

The two may come from different explorations. The speed of each is known by the runs of its whole model, whose noise is
estimated as the search does it. Without such runs its measured blocks compose it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import Field
from scipy.special import stdtr, stdtrit

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.base import Frozen
from bexp.explorer.records.measurement import Outcome, WholeModelMeasurement
from bexp.explorer.records.recommendation import CandidateFigures
from bexp.explorer.records.trial import Trial, TrialKind
from bexp.explorer.search.confidence import MOST_CONFIDENT
from bexp.explorer.surrogate.whole_model_error import COMMON_STD, NOISE_RUNS, RUN_STD, WholeModelNoise, WholeModelRun

KNOWN = 0.95
"""With this probability of being the faster one, it is known which one is."""
MOST_RUNS = 100
LEAST_VARIANCE = 1e-12
COMPOSED_DEGREES = 3.0
"""Degrees of freedom of what measured blocks compose: its error has heavy tails."""


class ComparedSide(Frozen):
    """The speed of one candidate, and how well it is known."""

    tokens_per_second: float = Field(description="Of one device: the geometric mean of its runs.")
    num_runs: int = Field(description="Runs of its whole model; 0 if measured blocks compose its speed.")
    standard_error: float = Field(description="Relative, of the tokens/s.")
    run_noise: float = Field(description="Relative standard deviation between two such runs, as it is estimated.")
    degrees: float = Field(description="Degrees of freedom of that estimate.")


class Comparison(Frozen):
    """The probability that candidate B is faster than candidate A."""

    a: ComparedSide
    b: ComparedSide
    probability_b_faster: float = Field(description="0.01..0.99, by Student's t distribution.")
    speedup: float = Field(description="Tokens/s of B over those of A.")
    speedup_90_percent: tuple[float, float] = Field(description="The interval that holds it with a probability of 90%.")
    runs_needed: int | None = Field(
        description=f"Further runs of each until one of them is faster with a probability of {KNOWN:.0%}, if the "
        f"speedup stays what it is; 0 if that is known, null if {MOST_RUNS} do not suffice."
    )


class CurvePoint(Frozen):
    """The fastest candidate that ran at a micro-batch size: of those that fit, if any does."""

    micro_batch_size: int
    tokens_per_second: float = Field(description="Of one device.")
    is_measured_whole: bool = Field(description="Whether whole steps were measured, and not only their parts.")
    fits: bool = Field(description="Whether its peak with reserve is within the memory limit.")


@dataclass(frozen=True)
class MeasuredCandidate:
    """A recommended candidate, with the trials of its explorations and the kind of its device, `cuda` or `cpu`."""

    chosen: CandidateFigures
    run_noise: float | None
    trials: Sequence[Trial]
    device_kind: str

    def side(self) -> ComparedSide:
        """Return the speed that the runs show."""
        whole = self.chosen.whole_model
        runs = whole_runs(self.chosen.candidate, self.trials)
        if not runs and whole is not None:  # an answer that another exploration measured
            runs = [(whole.tokens_per_second, whole.measurement)]
        noise = self.run_noise or 0.0
        if not runs:
            noise = math.hypot(noise, RUN_STD[self.device_kind])
            error = math.hypot(noise, 0.0 if self.chosen.candidate.is_whole else COMMON_STD[self.device_kind])
            return ComparedSide(
                tokens_per_second=self.chosen.tokens_per_second,
                num_runs=0,
                standard_error=error,
                run_noise=noise,
                degrees=COMPOSED_DEGREES,
            )
        summary = WholeModelRun.of([speed for speed, _ in runs], [_relative_error(run) for _, run in runs])
        error = float(WholeModelNoise(self.device_kind, [summary], np.array([noise])).of_means[0])
        return ComparedSide(
            tokens_per_second=math.exp(summary.log_tokens),
            num_runs=summary.number,
            standard_error=error,
            run_noise=error * math.sqrt(summary.number),
            degrees=_degrees(summary.number),
        )


def whole_runs(candidate: Candidate, trials: Sequence[Trial]) -> list[tuple[float, WholeModelMeasurement]]:
    """Return the tokens/s and the measurement of each run of a candidate's whole model."""
    return [
        (trial.tokens_per_second, run)
        for trial in trials
        if trial.candidate == candidate and trial.measurement.outcome is Outcome.OK
        if trial.tokens_per_second and (run := trial.measurement.whole_model) is not None
    ]


def throughput_curve(
    chosen: CandidateFigures, side: ComparedSide, trials: Iterable[Trial], fits: Callable[[Trial], bool]
) -> list[CurvePoint]:
    """Return the fastest point of each micro-batch size that ran, from the smallest size; one that fits goes before.

    At the size of `chosen` it is `chosen` with the speed of `side`, so that the curve leads through what is compared. A
    candidate that ran whole has the speed of its latest whole run, whatever its parts compose.
    """
    latest: dict[Candidate, Trial] = {}
    for trial in trials:
        ran = trial.measurement.outcome is Outcome.OK and trial.tokens_per_second is not None
        if not ran or trial.candidate.variant != chosen.candidate.variant:
            continue
        known = latest.get(trial.candidate)
        if known is None or trial.kind is TrialKind.WHOLE_MODEL or known.kind is not TrialKind.WHOLE_MODEL:
            latest[trial.candidate] = trial
    points: dict[int, CurvePoint] = {}
    for candidate, trial in latest.items():
        size, speed = candidate.micro_batch_size, trial.tokens_per_second or 0.0
        is_whole = trial.kind is TrialKind.WHOLE_MODEL or candidate.is_whole
        point = CurvePoint(micro_batch_size=size, tokens_per_second=speed, is_measured_whole=is_whole, fits=fits(trial))
        if size not in points or _rank(point) > _rank(points[size]):
            points[size] = point
    size = chosen.candidate.micro_batch_size
    is_whole = side.num_runs > 0 or chosen.candidate.is_whole
    points[size] = CurvePoint(
        micro_batch_size=size, tokens_per_second=side.tokens_per_second, is_measured_whole=is_whole, fits=True
    )
    return [points[size] for size in sorted(points)]


def _rank(point: CurvePoint) -> tuple[bool, float]:
    return point.fits, point.tokens_per_second


def compare(a: ComparedSide, b: ComparedSide) -> Comparison:
    """Return how likely it is that B is the faster one."""
    surest = MOST_CONFIDENT / 100
    log_speedup = math.log(b.tokens_per_second / a.tokens_per_second)
    error, degrees = _error(a, b, 0)
    reach = float(stdtrit(degrees, 0.95)) * error
    return Comparison(
        a=a,
        b=b,
        probability_b_faster=min(surest, max(1.0 - surest, _probability(a, b, 0, log_speedup))),
        speedup=math.exp(log_speedup),
        speedup_90_percent=(math.exp(log_speedup - reach), math.exp(log_speedup + reach)),
        runs_needed=next((n for n in range(MOST_RUNS + 1) if _probability(a, b, n, abs(log_speedup)) >= KNOWN), None),
    )


def _probability(a: ComparedSide, b: ComparedSide, more: int, log_speedup: float) -> float:
    error, degrees = _error(a, b, more)
    return float(stdtr(degrees, log_speedup / error))


def _error(a: ComparedSide, b: ComparedSide, more: int) -> tuple[float, float]:
    """Return the standard error of the logarithm of the speedup after `more` runs of each, and its degrees of freedom.

    The degrees are those of Welch and Satterthwaite. Further runs take the place of what measured blocks compose.
    """
    parts = []
    for side in (a, b):
        number = side.num_runs + more
        variance = side.standard_error**2 if more == 0 else side.run_noise**2 / number
        parts.append((max(variance, LEAST_VARIANCE), side.degrees if more == 0 else _degrees(number)))
    total = sum(variance for variance, _ in parts)
    return math.sqrt(total), total**2 / sum(variance**2 / degrees for variance, degrees in parts)


def _degrees(num_runs: int) -> float:
    return float(NOISE_RUNS + num_runs - 1)


def _relative_error(whole: WholeModelMeasurement) -> float:
    return whole.standard_error_seconds / whole.micro_step_seconds if whole.micro_step_seconds else 0.0
