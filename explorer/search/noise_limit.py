"""Limits by the noise between runs: the confidence that more runs could reach, and when a noisy search ends.

The n-th run of a component says less than the first. So it is known beforehand how far more runs narrow the differences
between candidates. After k more runs, with a standard deviation of r between them, the variance of a component's
seconds has fallen from v to 1 / (1/v + k/r^2). The posterior samples are split accordingly, into what those runs would
settle and what they would leave open (a preposterior analysis; Raiffa and Schlaifer, 1961). The composition's error
stays open, because components do not show it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bexp.explorer.cost.composition import Floats, Ints
from bexp.explorer.search.confidence import Contenders, confidence_score
from bexp.explorer.search.history import TrialHistory
from bexp.explorer.search.posterior import Posterior

LEVELS = (0.01, 0.05, 0.10)
"""The tolerances for which an answer states its confidence."""
MOST_RUNS = 4
"""The most runs of one component. Runs within minutes see the same state of the machine, so more runs tell little."""
NOISY = 2.0
"""Whole models still tell candidates apart if two runs differ by less than so many tolerances."""
SURELY = 0.1
"""A device counts as noisy by this quantile of what its noise may be: a few runs that differ may do so by chance."""
NUM_OUTCOMES = 32
LUCKY = 0.9
"""So many outcomes of the further runs are imagined. The confidence that they can reach is this quantile of theirs."""
WIDER_TOLERANCE = 0.05
"""It ends earlier once it is surely within this tolerance of the best."""
LIMITED_SHARE = 0.125
"""A search that noise limits has at most this share of its variant's budget."""


@dataclass(frozen=True, slots=True)
class NoiseFigures:
    """The relative standard deviation between two runs of a micro-step, and the confidence as it is printed.

    `confidences` has the tolerance with two decimals as its key. `expected_regret` is a share of the tokens/s.
    """

    run_noise: float
    confidences: dict[str, int]
    expected_regret: float


class NoiseLimit:
    """Says whether noise keeps the confidence below its target. It depends on a variant's trials alone."""

    def __init__(self, posterior: Posterior, history: TrialHistory, variant: int) -> None:
        self._posterior = posterior
        self._history = history
        self._variant = variant
        self._version: tuple[int, int] | None = None
        self._reached = (False, False)

    @property
    def is_reached(self) -> bool:
        """Whether the confidence cannot reach its target, whatever is measured again within the budget."""
        return self._now[0]

    @property
    def outweighs_whole_models(self) -> bool:
        """Whether whole models tell hardly more than components: the limit is reached, or single runs differ much.

        That stays true after whole models, whatever they say.
        """
        return self._is_noisy(WIDER_TOLERANCE) or self.is_reached

    @property
    def ends_search(self) -> bool:
        """Whether the limit is reached, and the variant has used LIMITED_SHARE of its budget.

        The search ends earlier if the confidence reaches its target for WIDER_TOLERANCE.
        """
        return self._now[1]

    @property
    def settles_on_cpu(self) -> bool:
        """Whether steps are composed on a CPU, and the confidence has reached its target for WIDER_TOLERANCE.

        Two runs of one whole model differ by several percent there (benchmarks/results/cpu-quiet.jsonl), so further
        whole models tell candidates that are nearer hardly apart.
        """
        return composes_on_cpu(self._posterior) and self._is_near()

    def _is_near(self) -> bool:
        """Whether the fastest candidate is surely within WIDER_TOLERANCE of the best."""
        contenders, request = self._posterior.contenders, self._posterior.request
        if contenders.incumbent is None:
            return False
        confidence = contenders.confidence_if_it_runs(contenders.incumbent, max(WIDER_TOLERANCE, request.tolerance))
        return confidence_score(confidence) >= request.budget.confidence_target

    def _is_noisy(self, least: float) -> bool:
        """Whether two runs of the fastest candidate surely differ by more than `least`."""
        contenders = self._posterior.contenders
        incumbent = contenders.incumbent
        return incumbent is not None and shown_noise(self._posterior, int(contenders.rows[incumbent])) > least

    @property
    def _now(self) -> tuple[bool, bool]:
        """Whether noise limits the search, and whether it ends the search."""
        version = self._posterior.knowledge.version, len(self._history.trials)  # some trials teach nothing
        if self._version != version:
            self._version, self._reached = version, self._compute()
        return self._reached

    def _compute(self) -> tuple[bool, bool]:
        posterior, request = self._posterior, self._posterior.request
        incumbent = posterior.contenders.incumbent
        if incumbent is None or not self._is_noisy(NOISY * request.tolerance):
            return False, False
        target = request.budget.confidence_target
        confidence = posterior.search_confidence or 0.0
        reachable = reachable_confidence(posterior, request.tolerance, self._history.seconds_left(self._variant))
        if confidence_score(max(confidence, reachable)) >= target:
            return False, False
        spent = self._history.seconds_of(posterior.table.model.variant)
        stages = 2 if posterior.surrogate.compiled_K.any() else 1  # eager code has the first share for itself
        has_share = spent < stages * LIMITED_SHARE * self._history.seconds_each
        return True, self._is_near() or not has_share


def composes_on_cpu(posterior: Posterior) -> bool:
    """Return whether the device is a CPU, and steps are composed of blocks."""
    return posterior.hardware.device_kind == "cpu" and not posterior.is_whole


def run_noise(posterior: Posterior, row: int, quantile: float = 0.5) -> float:
    """Return the relative standard deviation between two runs of a candidate's micro-step, as its components show it.

    `quantile` is that of what the noise may be.
    """
    return float(posterior.surrogate.step_run_std(posterior.table, np.array([row]), quantile)[0])


def noise_figures(posterior: Posterior, row: int) -> NoiseFigures:
    """Return the noise between runs of a contender, and the confidence in it for each of LEVELS."""
    (position,) = map(int, np.flatnonzero(posterior.contenders.rows == row))
    contenders = posterior.contenders
    confidences = {f"{level:.2f}": confidence_score(contenders.confidence(position, level)) for level in LEVELS}
    return NoiseFigures(run_noise(posterior, row), confidences, contenders.expected_regret(position))


def shown_noise(posterior: Posterior, row: int) -> float:
    """Return the least that the `run_noise` surely is, capped by the scatter of components that were run several times.

    Single runs do not tell noise from a device that is unlike what was expected.
    """
    repeated = [runs for runs in posterior.knowledge.log.runs.values() if len(runs.runs) > 1]
    if not repeated:
        return 0.0
    squares, freedom = sum(r.squared_deviations for r in repeated), sum(len(r.runs) - 1 for r in repeated)
    return min(run_noise(posterior, row, SURELY), math.sqrt(squares / freedom))


def reachable_confidence(posterior: Posterior, tolerance: float, seconds: float) -> float:
    """Return the confidence, 0..1, that further runs within `seconds` can reach if they are lucky.

    They are runs of the components of every candidate that may be the best, each up to MOST_RUNS. If the seconds do not
    suffice for all, each gets its share.
    """
    contenders = posterior.contenders
    incumbent = contenders.incumbent
    assert incumbent is not None, "a candidate is known"
    is_best_A = np.bincount(contenders.tokens_NA.argmax(axis=1), minlength=contenders.rows.size) > 0
    is_best_A[incumbent] = True
    rivals = np.flatnonzero(is_best_A & ~contenders.undecided_A)
    removed_A = _share_removed(posterior, contenders.rows[rivals], seconds)
    return _lucky_confidence(contenders, rivals, removed_A, tolerance)


def _share_removed(posterior: Posterior, rows: Ints, seconds: float) -> Floats:
    """Return the share of the variance of each candidate's micro-step that further runs would remove, shape (A,)."""
    table, surrogate = posterior.table, posterior.surrogate
    columns_AP = table.columns_CP[rows]
    used = np.unique(columns_AP[table.used_CP[rows]])
    runs_K = np.zeros(len(table.components))
    runs_K[used] = [max(0, MOST_RUNS - posterior.knowledge.log.count_attempts(table.components[k])) for k in used]
    cost = float((runs_K * posterior.measuring_seconds_K)[used].sum())
    runs_K *= min(1.0, max(0.0, seconds) / cost) if cost > 0 else 0.0
    before_K = surrogate.log_std_K**2
    after_K = before_K / (1.0 + runs_K * before_K / surrogate.run_std_K(SURELY) ** 2)
    weights_AP = table.step_shares(surrogate.device_mean_K, rows) ** 2
    before_A = (weights_AP * before_K[columns_AP]).sum(axis=1)
    after_A = (weights_AP * after_K[columns_AP]).sum(axis=1)
    return np.asarray(1.0 - np.divide(after_A, before_A, out=np.ones_like(after_A), where=before_A > 0))


def _lucky_confidence(contenders: Contenders, rivals: Ints, removed_A: Floats, tolerance: float) -> float:
    """Return the confidence after an outcome of the further runs that is lucky."""
    composed_NA, tokens_NA = contenders.composed_NA[:, rivals], contenders.tokens_NA[:, rivals]
    runs_NA = (composed_NA > 0.0) & (tokens_NA > 0.0)
    log_NA = np.log(np.where(runs_NA, composed_NA, 1.0))
    number_A = np.maximum(1, runs_NA.sum(axis=0))
    mean_A = np.where(runs_NA, log_NA, 0.0).sum(axis=0) / number_A
    around_NA = np.where(runs_NA, log_NA - mean_A, 0.0)
    error_NA = np.where(runs_NA, np.log(np.where(runs_NA, tokens_NA, 1.0)) - log_NA, -np.inf)
    open_NA = np.sqrt(1.0 - removed_A) * around_NA + error_NA
    expected_A = mean_A + np.where(runs_NA, error_NA, 0.0).sum(axis=0) / number_A + np.log(runs_NA.mean(axis=0) + 1e-9)
    shares = []
    for outcome in around_NA[:: max(1, len(around_NA) // NUM_OUTCOMES)]:
        log_tokens_NA = mean_A + np.sqrt(removed_A) * outcome + open_NA
        best = int(np.argmax(expected_A + np.sqrt(removed_A) * outcome))
        least_N = log_tokens_NA.max(axis=1) + np.log1p(-tolerance)
        shares.append(float((np.isfinite(least_N) & (log_tokens_NA[:, best] >= least_N)).mean()))
    return float(np.quantile(shares, LUCKY))
