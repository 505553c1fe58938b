"""Optuna's own samplers, which choose among the candidates that can still be tried."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from optuna.distributions import IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from bexp.explorer.search.acquisition import suggest_measurement
from bexp.explorer.search.posterior import Posterior
from bexp.explorer.search.stages import SearchStages
from bexp.explorer.search.study import TRIAL_NUMBER, Params, Points, PointSampler
from bexp.explorer.search.suggestion import Suggestion


@dataclass(frozen=True, slots=True)
class StockSampler:
    """How to make one of Optuna's samplers with a seed, and how many points it may propose for one trial.

    A proposal may be no legal candidate, or one that was tried. Proposals of a sampler that draws at random differ;
    those of one that maximises an acquisition function hardly do, and each takes long.
    """

    make: Callable[[int], BaseSampler]
    most_proposals: int


STOCK_SAMPLERS: Mapping[str, StockSampler] = {
    "tpe": StockSampler(lambda seed: TPESampler(seed=seed), most_proposals=100),
    "gp": StockSampler(lambda seed: GPSampler(seed=seed), most_proposals=1),
    "random": StockSampler(lambda seed: RandomSampler(seed=seed), most_proposals=100),
}


class StockCandidateSampler(PointSampler):
    """Lets one of Optuna's samplers choose among the legal candidates that can still be tried.

    It sees the study alone. A proposal that cannot be tried is drawn again; if none of the proposals can be, the
    nearest candidate takes the place of the last. Each suggestion comes from a new sampler, whose seed follows from the
    request's seed and the number of trials, so that a resumed search makes the same suggestions.
    """

    def __init__(self, posterior: Posterior, points: Points, stock: StockSampler) -> None:
        super().__init__(points)
        self._posterior = posterior
        self._stock = stock

    def suggest(self, study: Study, trial: FrozenTrial) -> Suggestion | None:
        """A proposal of Optuna's sampler, with every component of it that is not measured."""
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
        """How far two points are apart: by the ratio of numbers, and 1 for each other value that differs."""
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
        return suggest_measurement(self._stages.posterior)


def make_sampler(name: str, stages: SearchStages, points: Points) -> PointSampler:
    """The sampler of a request: `bexp`, or one of `STOCK_SAMPLERS`."""
    if name == "bexp":
        return BexpSampler(stages, points)
    return StockCandidateSampler(stages.posterior, points, STOCK_SAMPLERS[name])
