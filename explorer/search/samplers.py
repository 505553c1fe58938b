"""The samplers of the study: our own acquisition, with the stages of its search, and those of Optuna."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from optuna.distributions import IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from bexp.explorer.cost.components import Component
from bexp.explorer.cost.composition import Composition, Floats, Mask
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.dimensions.kernels import Kernels
from bexp.explorer.records.trial import Trial
from bexp.explorer.search.confidence import Contenders
from bexp.explorer.search.history import TrialHistory
from bexp.explorer.search.noise_limit import LIMITED_SHARE, MOST_RUNS
from bexp.explorer.search.posterior import Posterior
from bexp.explorer.search.study import TRIAL_NUMBER, Params, Points, PointSampler
from bexp.explorer.search.suggestion import Suggestion, worth

FIRST_CONFIDENCE = 90
FIRST_SHARE = 0.25
"""The share of a variant's seconds after which the first stage is over, whatever its confidence."""


class SearchStages:
    """Says which candidates the search looks at. A stage depends on the stored trials alone.

    The first stage has the candidates with the base's loss, in eager code with the model's own kernels. It is left out
    if these are all candidates, or if one of Optuna's own samplers searches.
    """

    def __init__(self, posterior: Posterior, base: Candidate, trials: Sequence[Trial]) -> None:
        self._posterior = posterior
        candidates = posterior.table.candidates
        self._first_C: Mask = np.array([_is_first(candidate, base) for candidate in candidates])
        begun = any(not self._first_C[posterior.table.row[t.candidate]] for t in _known(trials, posterior))
        self.is_last = bool(self._first_C.all()) or begun or posterior.request.sampler != "bexp"

    @property
    def posterior(self) -> Posterior:
        """The posterior by which the search decides."""
        return self._posterior if self.is_last else self._posterior.among(self._first_C)

    @property
    def confidence_target(self) -> int:
        """The confidence, among the candidates of a stage, with which that stage is over."""
        target = self._posterior.request.budget.confidence_target
        return target if self.is_last else min(target, FIRST_CONFIDENCE)

    def is_spent(self, history: TrialHistory, *, noisy: bool) -> bool:
        """Return whether the first stage has had its share of the seconds, which is smaller under noise."""
        spent = history.seconds_of(self._posterior.table.model.variant)
        share = LIMITED_SHARE if noisy else FIRST_SHARE
        return not self.is_last and spent >= share * history.seconds_each


def _is_first(candidate: Candidate, base: Candidate) -> bool:
    eager = candidate.execution in (None, Execution.EAGER)
    return eager and candidate.kernels in (None, Kernels.LIBRARY) and candidate.loss == base.loss


def _known(trials: Sequence[Trial], posterior: Posterior) -> list[Trial]:
    return [trial for trial in trials if trial.candidate in posterior.table.row]


@dataclass(frozen=True, slots=True)
class StockSampler:
    """The way to make one of Optuna's samplers with a seed, and how many points it may propose for one trial.

    A proposal may be no legal candidate, or one that was tried. A sampler that draws at random then proposes others.
    One that maximises an acquisition function proposes almost the same again, and each proposal takes long.
    """

    make: Callable[[int], BaseSampler]
    most_proposals: int


STOCK_SAMPLERS: Mapping[str, StockSampler] = {
    "tpe": StockSampler(lambda seed: TPESampler(seed=seed), most_proposals=100),
    "gp": StockSampler(lambda seed: GPSampler(seed=seed), most_proposals=1),
    "random": StockSampler(lambda seed: RandomSampler(seed=seed), most_proposals=100),
}


class StockCandidateSampler(PointSampler):
    """Lets one of Optuna's samplers choose among the legal candidates that can still be tried. It sees the study alone.

    Each suggestion comes from a new sampler, whose seed follows from the request's seed and the number of trials. So a
    resumed search makes the same suggestions.
    """

    def __init__(self, posterior: Posterior, points: Points, stock: StockSampler) -> None:
        super().__init__(points)
        self._posterior = posterior
        self._stock = stock

    def suggest(self, study: Study, trial: FrozenTrial) -> Suggestion | None:
        """Return a proposal of Optuna's sampler, with every component of it that is not measured.

        A proposal that cannot be tried is drawn again. If none of the proposals can be, the nearest candidate takes the
        place of the last.
        """
        others = [each for each in study.get_trials(deepcopy=False) if each.number != trial.number and each.params]
        tried = {self.points.row(each.params) for each in others if each.state is not TrialState.FAIL}
        left = {int(row) for row in self._posterior.open_rows()} - tried
        left = {row for row in left if not self._posterior.is_known(row)}
        if not left:
            return None
        # A trial that had no suggestion counts for nothing: a resumed study does not have it.
        number = sum(each.state is TrialState.RUNNING or TRIAL_NUMBER in each.user_attrs for each in others)
        seed = int(np.random.default_rng([self._posterior.request.seed, number]).integers(1 << 31))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            sampler = self._stock.make(seed)
        for _ in range(self._stock.most_proposals):
            params = self._propose(sampler, study, trial)
            row = self.points.row(params)
            if row in left:
                break
        else:
            row = min(sorted(left), key=lambda each: self._distance(params, self.points.params(each)))
        assert row is not None, "it is one of those that are left"
        return Suggestion(row, self._posterior.missing(row), reason=type(sampler).__name__)

    def _propose(self, sampler: BaseSampler, study: Study, trial: FrozenTrial) -> dict[str, Any]:
        space = self.points.distributions
        params = sampler.sample_relative(study, trial, sampler.infer_relative_search_space(study, trial))
        for name, distribution in space.items():
            if distribution.single():
                params[name] = self.points.params(0)[name]
            elif name not in params:
                params[name] = sampler.sample_independent(study, trial, name, distribution)
        return params

    def _distance(self, one: Params, other: Params) -> float:
        """Return how far two points are apart: by the ratio of numbers, and 1 for each other value that differs."""
        apart = 0.0
        for name, distribution in self.points.distributions.items():
            if one[name] == other[name]:
                continue
            if isinstance(distribution, IntDistribution):
                apart += abs(math.log(one[name] / other[name])) / math.log(distribution.high / distribution.low)
            else:
                apart += 1.0
        return apart


class BexpSampler(PointSampler):
    """The default sampler, `bexp`: the measurement with the highest expected gain a second."""

    def __init__(self, stages: SearchStages, points: Points) -> None:
        super().__init__(points)
        self._stages = stages

    def suggest(self, study: Study, trial: FrozenTrial) -> Suggestion | None:
        """The acquisition's choice."""
        return suggest_measurement(self._stages.posterior, decides=self._stages.is_last)


def make_sampler(name: str, stages: SearchStages, points: Points) -> PointSampler:
    """The sampler of a request: `bexp`, or one of `STOCK_SAMPLERS`."""
    if name == "bexp":
        return BexpSampler(stages, points)
    return StockCandidateSampler(stages.posterior, points, STOCK_SAMPLERS[name])


NEGLIGIBLE = 0.03
"""A gain below this share of the tolerance is not worth a trial; neither is a rival less likely than this."""
RIVALS = 3
"""The number of the incumbent's most likely rivals that are considered for another run."""
TELLING_SHARE = 0.5
"""A component is run again if it adds at least this share of the noise that the noisiest component adds."""


@dataclass(frozen=True, slots=True)
class _Option:
    """Something to measure, and its expected gain a second."""

    gain_per_second: float
    suggestion: Suggestion


def suggest_measurement(posterior: Posterior, *, decides: bool = True) -> Suggestion | None:
    """Return the better of a new candidate and a repeated run; None if no measurement is expected to change anything.

    A stage that does not decide repeats nothing: the difference of two candidates matters only if one of them is the
    best of all. The trials in flight count as if each of them had measured what is expected of it.
    """
    posterior = posterior.expecting_pending()
    if posterior.contenders.rows.size == 0:
        return None
    costs_K = posterior.measuring_seconds_K
    options = (_new_candidate(posterior, costs_K), _repeated_run(posterior, costs_K) if decides else None)
    useful = [option for option in options if option is not None]
    return max(useful, key=lambda option: option.gain_per_second).suggestion if useful else None


def _new_candidate(posterior: Posterior, costs_K: Floats) -> _Option | None:
    """Return the candidate with unknown components that has the highest expected improvement per second."""
    contenders, table = posterior.contenders, posterior.table
    unknown_A = contenders.wanted_AP.any(axis=1)
    if not unknown_A.any():
        return None
    incumbent = contenders.incumbent
    if incumbent is None:
        gain_A = contenders.tokens_NA.mean(axis=0)
        gain_A = gain_A / max(float(gain_A.max()), 1e-9)
    else:
        # Components show neither the composition's error nor whether a whole model runs. The first is therefore left
        # out of the gain, and a sample in which a candidate does not run counts as no gain.
        own_N = contenders.composed_NA[:, incumbent]
        gain_NA = np.where(contenders.tokens_NA > 0.0, contenders.composed_NA - own_N[:, None], 0.0)
        gain_A = np.maximum(0.0, gain_NA).mean(axis=0) / max(float(own_N.mean()), 1e-9)
    cost_A = (contenders.wanted_AP * costs_K[table.columns_CP[contenders.rows]]).sum(axis=1)
    compiling_A = (contenders.wanted_AP * posterior.preparing_seconds_K[table.columns_CP[contenders.rows]]).sum(axis=1)
    least_A = posterior.request.tolerance * np.maximum(NEGLIGIBLE, 0.0 if incumbent is None else worth(compiling_A))
    if posterior.is_whole:  # a candidate counts as unknown until it is measured, or until no sample has it faster
        least_A = np.zeros_like(gain_A)
    gain_A = np.where(unknown_A & (gain_A >= least_A), gain_A, 0.0)
    if gain_A.max() <= 0.0:
        return None
    rate_A = np.divide(gain_A, cost_A, out=np.zeros_like(gain_A), where=unknown_A)
    best = int(np.argmax(rate_A))
    row = int(contenders.rows[best])
    reason = f"expected improvement {gain_A[best]:.2%} for {cost_A[best]:.2f} s"
    components = _components(table, row, contenders.wanted_AP[best])
    return _Option(float(rate_A[best]), Suggestion(row, components, reason=reason))


def _repeated_run(posterior: Posterior, costs_K: Floats) -> _Option | None:
    """Return the repeated run that best separates the incumbent from one of its most likely rivals."""
    contenders, tolerance = posterior.contenders, posterior.request.tolerance
    incumbent = contenders.incumbent
    if incumbent is None:
        return None
    own_N = contenders.composed_NA[:, incumbent]
    better_A = ((1.0 - tolerance) * contenders.composed_NA > own_N[:, None]).mean(axis=0)
    better_A = np.where(contenders.clear_A, better_A, 0.0)
    best: _Option | None = None
    for rival in np.argsort(-better_A, kind="stable")[:RIVALS]:
        if better_A[rival] < NEGLIGIBLE:
            break
        if _composition_hides_more(contenders, (incumbent, int(rival))):
            continue
        option = _run_of_pair(posterior, costs_K, (incumbent, int(rival)), float(better_A[rival]))
        if option is not None and (best is None or option.gain_per_second > best.gain_per_second):
            best = option
    return best


def _composition_hides_more(contenders: Contenders, pair: tuple[int, int]) -> bool:
    """Return whether the error of composition hides more of the difference of two candidates than their components do.

    Further runs of components then hardly raise the confidence. Whole models show both errors; without them (`verify:
    false`) the difference stays open.
    """
    columns = list(pair)
    tokens_N2, composed_N2 = contenders.tokens_NA[:, columns], contenders.composed_NA[:, columns]
    run_N = (tokens_N2 > 0.0).all(axis=1) & (composed_N2 > 0.0).all(axis=1)
    if not run_N.any():
        return False
    composed_N2 = np.log(composed_N2[run_N])
    error_N2 = np.log(tokens_N2[run_N]) - composed_N2
    return float(np.diff(composed_N2).std()) < float(np.diff(error_N2).std())


def _run_of_pair(
    posterior: Posterior, costs_K: Floats, pair: tuple[int, int], probability_better: float
) -> _Option | None:
    """Return another run of the components that add most noise to the difference between two candidates."""
    table, surrogate = posterior.table, posterior.surrogate
    rows = posterior.contenders.rows[list(pair)]
    shares_K = np.zeros((2, len(table.components)))
    shares = table.step_shares(surrogate.device_mean_K, rows)
    for i in range(2):
        np.add.at(shares_K[i], table.columns_CP[rows[i]], shares[i])
    blur_K = np.abs(shares_K[0] - shares_K[1]) * surrogate.log_std_K
    blur = np.where(table.used_CP[rows], blur_K[table.columns_CP[rows]], 0.0)
    for i, p in zip(*np.nonzero(blur), strict=True):
        if not 0 < posterior.count_attempts(table.components[table.columns_CP[rows[i], p]]) < MOST_RUNS:
            blur[i, p] = 0.0
    if blur.max() <= 0.0:
        return None
    telling = blur >= TELLING_SHARE * blur.max()
    chosen = int(np.argmax((np.where(telling, blur, 0.0) ** 2).sum(axis=1)))
    row, columns = int(rows[chosen]), table.columns_CP[rows[chosen]][telling[chosen]]
    cost = float(costs_K[columns].sum())
    gain = posterior.request.tolerance * probability_better
    if probability_better < worth(float(posterior.preparing_seconds_K[columns].sum())):
        return None
    reason = f"another run: a rival is better with probability {probability_better:.2f}"
    components = _components(table, row, telling[chosen])
    return _Option(gain / cost, Suggestion(row, components, again=True, reason=reason))


def _components(table: Composition, row: int, chosen_P: Mask) -> tuple[Component, ...]:
    return tuple(table.components[column] for column in table.columns_CP[row][chosen_P])
