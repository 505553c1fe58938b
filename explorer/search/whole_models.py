"""Chooses the whole models to run, and applies their results."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import CONTAMINATED_ATTEMPTS, Outcome
from bexp.explorer.records.trial import Trial
from bexp.explorer.search.alternatives import (
    best_stock,
    best_undivided,
    best_untiled,
    compare_whole_run,
    largest_untiled,
    promising_row,
)
from bexp.explorer.search.history import TrialHistory
from bexp.explorer.search.noise_limit import LIMITED_SHARE, NoiseLimit
from bexp.explorer.search.posterior import BestCandidate, Posterior
from bexp.explorer.search.search_space import NextCheck
from bexp.explorer.search.suggestion import Suggestion, worth

MATTERS = 0.25
"""Share of the tolerance by which a runner-up must be faster for its whole model to be worth a run."""
MOST_GAIN = 0.1
"""A candidate's improvement counts as at most this share when runner-ups are ranked.

Without a limit, candidates that hardly fit and would be several times as fast go first. Then none of the few whole
models are left for one that is sure to fit and likely to be better.
"""
MOST_WHOLE_RUNS = 3
"""The most whole models of one candidate, unless it is the recommended one."""


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """The row of a candidate to run whole."""

    row: int
    probability: float
    """That of being faster than the recommended candidate by more than MATTERS of the tolerance."""
    gain: float
    """The expected improvement, as a share of the recommended candidate's throughput."""
    probability_fits: float
    """That of the whole model to fit."""


def find_runner_up(posterior: Posterior, least_gain: float = 0.0) -> RunnerUp | None:
    """Return the candidate whose whole model is expected to improve the answer most; None if there is none to run.

    It is the contender with the highest expected gain over the recommended candidate (MOST_GAIN) for the seconds of its
    whole model, or the faster one of two equal ones. Those with less than `least_gain` are left out, unless all have
    less. The gain counts all that is not known: the error of composition, whether it fits, components that were
    predicted, and the noise of whole models that ran.

    The recommended candidate itself is returned if the contender was run whole more often, because another run of it
    tells more. Without a recommended candidate, the contender that is most likely to fit is returned.
    """
    contenders, rows = posterior.contenders, posterior.contenders.rows
    recommended = posterior.recommended_position
    number_A = np.array([posterior.knowledge.whole_models.count(int(row)) for row in rows])
    others = [i for i in range(rows.size) if i != recommended and number_A[i] < MOST_WHOLE_RUNS]
    if not others:
        return None
    if recommended is None:
        others = [i for i in others if not number_A[i]]
        if not others:
            return None
        best = max(others, key=lambda i: (contenders.runs_A[i], contenders.tokens_NA[:, i].mean()))
        return RunnerUp(int(rows[best]), fits := float(contenders.runs_A[best]), 1.0, fits)
    gain, rank = contenders.expected_gains(recommended), contenders.expected_gains(recommended, MOST_GAIN)
    others = [i for i in others if gain[i] >= least_gain] or others
    seconds = {i: posterior.whole_model_seconds(int(rows[i])) for i in others}
    best = max(others, key=lambda i: (rank[i] / seconds[i], contenders.mean_A[i]))
    faster = contenders.probability_faster(recommended, posterior.request.tolerance * MATTERS)
    row = recommended if number_A[best] > number_A[recommended] else best
    return RunnerUp(int(rows[row]), float(faster[best]), float(gain[best]), float(contenders.runs_A[row]))


def find_above_limit(posterior: Posterior) -> RunnerUp | None:
    """Return the candidate above the memory limit whose whole model is worth most if it fits; None if there is none.

    Its gain is the probability that it fits, times how much faster it is expected to be than the fastest one that fits.
    That probability is computed, because a few hundred samples hold too few in which an unlikely candidate fits.
    """
    contenders = posterior.contenders
    if contenders.incumbent is None or not contenders.undecided_A.any():
        return None
    fits_A = np.where(contenders.undecided_A, posterior.memory.chance_C[contenders.rows], 0.0)
    gain_A = fits_A * np.maximum(0.0, contenders.mean_A / contenders.mean_A[contenders.incumbent] - 1.0)
    best = int(np.argmax(gain_A))
    return RunnerUp(int(contenders.rows[best]), float(fits_A[best]), float(gain_A[best]), float(fits_A[best]))


ATTEMPTS = 40
"""The most whole models of one variant. Before, the confidence in the answer or the budget usually ends them."""
LEAST_CHANCE = 0.02
"""While nothing can be recommended, each whole model is at least so likely to fit."""
NEGLIGIBLE = 0.005
"""A runner-up whose expected gain is below this share of the tolerance is not run."""
CONSIDERABLE = 0.1
"""Once the confidence has reached its target, and two candidates were run whole, the gain must be at least this share.
"""
FEW_RUNS, TIMES_SEARCHED = 4, 1.0
"""Once the confidence has reached its target, and a few whole models were run, all of them take at most so many times
the seconds in which components were measured.
"""
RUN_WORTH = 0.5
"""The gain that a runner-up's whole model must promise once the confidence has reached its target.

It is a share of what its seconds are worth to the compiler. It is less, because a whole model also makes the answer
surer.
"""
SHARE = 1 / 2
"""Share of a variant's seconds that its whole models have, after the first that ran well.

If noise outweighs what they tell, it is the same share of the seconds that a search then has.
"""
REFUTING = frozenset({Outcome.OUT_OF_MEMORY, Outcome.CRASHED})
"""A candidate whose whole model ends like this is not recommended."""


class WholeModels:
    """The whole models of one variant. Every decision depends on the stored trials alone."""

    def __init__(self, posterior: Posterior, history: TrialHistory, variant: int, noise: NoiseLimit) -> None:
        self._posterior = posterior
        self._history = history
        self._variant = variant
        self._noise = noise
        for trial in self.trials:
            self.learn(trial)

    @property
    def trials(self) -> list[Trial]:
        """The whole-model trials, whatever their outcome, in order."""
        return self._history.whole_models(self._posterior.table.model.variant)

    @property
    def has_run(self) -> bool:
        """Whether a whole model ran well."""
        return any(trial.measurement.outcome is Outcome.OK for trial in self.trials)

    @property
    def is_impossible(self) -> bool:
        """Whether no whole model can be run here, or not in time."""
        timed_out = any(trial.measurement.outcome is Outcome.TIMED_OUT for trial in self.trials)
        knowledge = self._posterior.knowledge
        return timed_out or knowledge.failures.none_runs_whole(self._posterior.table, knowledge.whole_models.by_row)

    @property
    def ends_search(self) -> bool:
        """Whether no more components are measured: a whole model ran well, and the answer is sure or another is run."""
        return self.has_run and (self._is_sure(self._posterior.recommend()) or self.next() is not None)

    def learn(self, trial: Trial) -> None:
        """Learn from a whole model: its throughput, or that its candidate is impossible."""
        posterior, candidate, outcome = self._posterior, trial.candidate, trial.measurement.outcome
        knowledge = posterior.knowledge
        if candidate not in posterior.table.row:
            return
        reason = trial.measurement.reason or f"the whole model {outcome}"
        if outcome is Outcome.OUT_OF_MEMORY:
            knowledge.reject(candidate, reason, too_large=True)
        elif outcome in REFUTING:
            knowledge.reject(candidate, reason)
        elif outcome is Outcome.UNSUPPORTED:
            knowledge.reject_alike(candidate, reason)
        check = compare_whole_run(posterior, posterior.table.row[candidate], trial)
        if check is not None:
            whole = check.measurement
            error = whole.standard_error_seconds / whole.micro_step_seconds if whole.micro_step_seconds else 0.0
            knowledge.learn_whole_model(candidate, check.tokens_per_second, error, whole.peak_bytes, trial.number)

    def next(self) -> NextCheck | None:
        """Return the next row to run whole, the recommended one and then runners-up; None when the answer is settled.

        The recommended candidate is run in any case. After a whole model that ran well, others are run if each is
        expected to end within their share of the budget: first the candidate that the answer has changed to, then
        runners-up (`find_runner_up`) whose expected gain is worth it. Last comes a candidate that does not fit as
        composed, if its gain makes up for its chance to fit (`find_above_limit`). If no candidate fits as composed,
        those that may fit are run, the likeliest first.

        After one that is unsupported here, candidates of another loss or execution follow, unless these end alike. No
        other is run after one that was not run in time. One on a shared or throttled device says nothing and is run
        again. On a CPU no other is run once the answer is surely within several percent of the best. A model that is
        always measured whole needs none.
        """
        check = self._wanted()
        return check if check is not None and self._begins(check) else None

    @property
    def lacks_time(self) -> bool:
        """Whether another whole model would make the answer surer, and there is no time for it."""
        if self._is_sure(self._posterior.recommend()):
            return False
        check = self._wanted()
        return check is not None and not self._begins(check)

    def _begins(self, check: NextCheck) -> bool:
        """Return whether there is time for a whole model; until one ran well and there is an answer, there is."""
        return not self.has_run or self._posterior.recommend() is None or self._has_time(check.row)

    def _wanted(self) -> NextCheck | None:
        """Return the next row to run whole if there is time for it."""
        posterior, trials = self._posterior, self.trials
        if posterior.is_whole:
            return None
        best = posterior.recommend()
        outcomes = [trial.measurement.outcome for trial in trials]
        if self.is_impossible or outcomes.count(Outcome.CONTAMINATED) >= CONTAMINATED_ATTEMPTS:
            return None
        if len(trials) >= ATTEMPTS:
            return None
        if self.has_run and best is not None and self._noise.settles_on_cpu:
            return None
        if best is not None and not posterior.knowledge.whole_models.was_run(best.row):
            return NextCheck(best.row)
        if best is None:
            return self._likeliest_to_fit()
        if self._history.exhausted(self._variant):
            return None
        least = CONSIDERABLE if self._is_compared(best) else NEGLIGIBLE
        rival = find_runner_up(posterior, least * posterior.request.tolerance)
        if rival is not None and self._is_sure(best):
            least = max(least, RUN_WORTH * worth(posterior.whole_model_seconds(rival.row)))
        if rival is None or rival.gain < least * posterior.request.tolerance:
            return self._above_limit()
        if rival.row == best.row:
            return NextCheck(rival.row)
        return NextCheck(rival.row, rival.probability, None if posterior.fits(rival.row) else rival.probability_fits)

    def _above_limit(self) -> NextCheck | None:
        """Return a candidate above the memory limit as composed, if its speed makes up for its small chance to fit."""
        above = find_above_limit(self._posterior)
        if above is None or above.gain < NEGLIGIBLE * self._posterior.request.tolerance:
            return None
        return NextCheck(above.row, above.probability, probability_fits=above.probability)

    def _has_time(self, row: int) -> bool:
        """Return whether the whole model of a candidate is expected to end within the share that whole models have."""
        share = SHARE * (LIMITED_SHARE if self._noise.outweighs_whole_models else 1.0)
        expected = self._posterior.whole_model_seconds(row)
        spent = sum(trial.seconds for trial in self.trials)
        searched = self._history.seconds_of(self._posterior.table.model.variant) - spent
        most = share * self._history.seconds_each
        if len(self.trials) >= FEW_RUNS and self._is_sure(self._posterior.recommend()):
            most = min(most, TIMES_SEARCHED * searched)
        return spent + expected <= most

    def _likeliest_to_fit(self) -> NextCheck | None:
        """Return the likeliest candidate to fit as a whole model where none fits as composed; None if hardly any does.

        The search may overdraw its budget until there is one candidate to recommend.
        """
        hopeless = self._history.is_hopeless(self._posterior.table.model.variant)
        if hopeless or self._history.overdrawn(self._variant):
            return None
        runner_up = find_runner_up(self._posterior)
        if runner_up is None or runner_up.probability < LEAST_CHANCE:
            return None
        return NextCheck(runner_up.row, probability_fits=runner_up.probability)

    def _is_sure(self, best: BestCandidate | None) -> bool:
        """Whether the confidence in the answer has reached its target."""
        return best is not None and 100 * best.confidence >= self._posterior.request.budget.confidence_target

    def _is_compared(self, best: BestCandidate) -> bool:
        """Whether another candidate than the best was run whole, and the confidence has reached its target."""
        if not self._is_sure(best):
            return False
        recommended = self._posterior.table.candidates[best.row]
        return any(t.measurement.outcome is Outcome.OK and t.candidate != recommended for t in self.trials)

    def of(self, candidate: Candidate) -> Trial | None:
        """The whole-model run of a candidate; of several the one that is nearest to what they reached together."""
        row = self._posterior.table.row.get(candidate)
        reached = None if row is None else self._posterior.knowledge.whole_models.tokens_per_second(row)
        if reached is None:
            return self._history.whole_model(candidate)
        ran = [t for t in self.trials if t.candidate == candidate and t.measurement.outcome is Outcome.OK]
        return min(ran, key=lambda t: abs(math.log((t.tokens_per_second or math.inf) / reached)))

    def runner_up_of(self, recommended: Candidate) -> Candidate | None:
        """The fastest other candidate that ran whole and fits, else the last that failed after `recommended` had run.

        One that ran and left too little memory free is no rival, however fast it is.
        """
        own, table = self.of(recommended), self._posterior.table
        reached = self._posterior.knowledge.whole_models.tokens_per_second
        others = [t for t in self.trials if t.candidate != recommended and t.candidate in table.row]
        ran = {row: speed for t in others if (speed := reached(row := table.row[t.candidate])) is not None}
        fitting = {row: speed for row, speed in ran.items() if self._posterior.fits(row)}
        failed = [t for t in others if table.row[t.candidate] not in ran]
        if fitting:
            return table.candidates[max(fitting, key=lambda row: fitting[row])]
        return failed[-1].candidate if own is not None and failed and failed[-1].number > own.number else None


COMPARISON_SHARE = 0.1
"""Share of the device seconds so far that one candidate of a comparison may cost.

The largest micro-batch that fits is the most expensive candidate, and smaller sizes predict the kernels of large ones
well. If it costs more than this, its throughput is predicted, and the answer says so.
"""


def next_comparison(posterior: Posterior, report: DeviceReport, spent_seconds: float) -> Suggestion | None:
    """Return the next measurement for the answer; None when it has all it needs, or the rest costs too much.

    The recommended candidate is completed first, because the search leaves out components that are predicted well
    enough. If memory is preferred, the candidate follows that would be recommended for it. If untiled attention is
    excluded, the best candidate with it is next, whatever it costs. The largest untiled micro-batch and the best
    candidate with stock back ends come last. `spent_seconds` are the device seconds so far.
    """
    best = posterior.recommend()
    if best is None:
        return None
    if not posterior.is_known(best.row):
        return Suggestion(best.row, posterior.missing(best.row))
    promising = promising_row(posterior)
    if promising is not None and (wanted := posterior.wanted(promising)):
        return Suggestion(promising, wanted)
    untiled = best_untiled(posterior) if posterior.request.bta.enable else None
    if untiled is not None and spent_seconds and (wanted := posterior.wanted(untiled)):
        return Suggestion(untiled, wanted)
    rows = posterior.open_rows()
    stock, undivided = best_stock(posterior, report, among=rows), best_undivided(posterior)
    for row in (largest_untiled(posterior, among=rows), stock, undivided):
        wanted = posterior.wanted(row) if row is not None else ()
        if row is None or not wanted:
            continue
        columns = [posterior.table.column[c] for c in wanted]
        cost = float(posterior.measuring_seconds_K[columns].sum())
        if cost <= COMPARISON_SHARE * spent_seconds:
            return Suggestion(row, wanted)
    return None
