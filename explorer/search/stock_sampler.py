"""Optuna's own samplers on the legal space."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import TrialState, create_trial

from bexp.explorer.search.optuna_sampler import CandidateSampler
from bexp.explorer.search.optuna_trials import MEASUREMENT, to_candidate
from bexp.explorer.search.search_state import SearchState
from bexp.explorer.search.suggestion import Suggestion
from bexp.explorer.spec.candidate import Candidate


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


class StockCandidateSampler(CandidateSampler):
    """Lets one of Optuna's samplers choose among the legal candidates that can still be tried.

    It sees objective values alone. A proposal that cannot be tried is drawn again; if none of the proposals can be, the
    nearest candidate takes the place of the last. Each suggestion comes from a new sampler, whose seed follows from the
    request's seed and the number of trials, so that a resumed search makes the same suggestions.
    """

    def __init__(self, state: SearchState, stock: StockSampler) -> None:
        super().__init__(state)
        self._stock = stock
        self._grid = _Grid(state.table.candidates)

    def suggest(self, study: Study) -> Suggestion | None:
        """A proposal of Optuna's sampler, with every component of it that is not measured."""
        table = self.state.table
        view, tried = self._view(study)
        left = [
            int(row)
            for row in self.state.open_rows()
            if table.candidates[row] not in tried and not self.state.is_known(row)
        ]
        if not left:
            return None
        available = {tuple(self._grid.points[row]): row for row in left}
        point = np.zeros(0, dtype=np.int64)
        for _ in range(self._stock.most_proposals):
            point = self._grid.to_point(view.ask(self._grid.space).params)
            if tuple(point) in available:
                break
        row = available.get(tuple(point))
        if row is None:
            row = left[int(np.argmin(self._grid.distances(point, left)))]
        return Suggestion(row, self.state.missing(row), reason=type(view.sampler).__name__)

    def _view(self, study: Study) -> tuple[Study, set[Candidate]]:
        """A study of the grid's dimensions with the same trials, and the candidates that were tried or are in flight.

        Trials without a measurement that are not in flight are left out: they were asked for and had no suggestion.
        """
        variant = self.state.table.model.variant
        trials = [
            t
            for t in study.get_trials(deepcopy=False)
            if t.params and (MEASUREMENT in t.user_attrs or t.state is TrialState.RUNNING)
        ]
        seed = int(np.random.default_rng([self.state.request.seed, len(trials)]).integers(1 << 31))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            view = optuna.create_study(direction="maximize", sampler=self._stock.make(seed))
        tried = set()
        for trial in trials:
            candidate = to_candidate(trial.params, variant)
            if trial.state is not TrialState.FAIL:
                tried.add(candidate)
            view.add_trial(
                create_trial(
                    state=trial.state,
                    value=trial.value if trial.state is TrialState.COMPLETE else None,
                    params=self._grid.to_params(self.state.table.row[candidate]),
                    distributions=self._grid.space,
                    constraints=trial.constraints,
                )
            )
        return view, tried


class _Grid:
    """The dimensions that have more than one value: sizes and tiles in their order, the others as categories.

    Axes: C candidates, D dimensions. `points` holds each candidate's place in every dimension.
    """

    def __init__(self, candidates: tuple[Candidate, ...]) -> None:
        columns: dict[str, list[Any]] = {
            "micro_batch_size": [c.micro_batch_size for c in candidates],
            "bta_tile": [c.bta_tile or 0 for c in candidates],
            "recompute": [c.recompute.value for c in candidates],
            "attention_backend": [c.attention_backend for c in candidates],
            "expert_backend": [c.expert_backend or "" for c in candidates],
            "context_parallel": [f"{c.context_parallel_size}:{c.context_parallel_layout or ''}" for c in candidates],
            "sharding": [c.sharding.value if c.sharding is not None else "" for c in candidates],
            "loss": [c.loss or "" for c in candidates],
            "execution": [c.execution or "" for c in candidates],
            "kernels": [c.kernels or "" for c in candidates],
            "settings": [c.settings or "" for c in candidates],
        }
        values = {name: sorted(set(column)) for name, column in columns.items()}
        self._values = {name: found for name, found in values.items() if len(found) > 1}
        self._ordinal_D = np.array([name in {"micro_batch_size", "bta_tile"} for name in self._values], dtype=np.bool_)
        self._width_D = np.array([len(found) - 1 for found in self._values.values()], dtype=np.float64)
        self.points = np.array(
            [[found.index(columns[name][i]) for name, found in self._values.items()] for i in range(len(candidates))],
            dtype=np.int64,
        )
        self.space: dict[str, BaseDistribution] = {
            name: IntDistribution(0, len(found) - 1) if ordinal else CategoricalDistribution(range(len(found)))
            for (name, found), ordinal in zip(self._values.items(), self._ordinal_D, strict=True)
        }

    def to_point(self, params: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The point that parameters name, shape (D,)."""
        return np.array([params[name] for name in self._values], dtype=np.int64)

    def to_params(self, row: int) -> dict[str, int]:
        """The parameters of a candidate."""
        return {name: int(place) for name, place in zip(self._values, self.points[row], strict=True)}

    def distances(
        self, point: np.ndarray[Any, np.dtype[np.int64]], rows: list[int]
    ) -> np.ndarray[Any, np.dtype[np.float64]]:
        """How far candidates are from a point: by places where values have an order, else 1 for another value."""
        steps = np.abs(self.points[rows] - point)
        return np.asarray(np.where(self._ordinal_D, steps / self._width_D, steps > 0).sum(axis=1))
