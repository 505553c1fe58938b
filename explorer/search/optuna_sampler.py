"""The search as an Optuna sampler: ask and tell, over the categorical dimensions of a legal space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial
from optuna.trial import Trial as OptunaTrial

from explorer.records.measurement import Measurement, Outcome
from explorer.records.trial import Trial, TrialKind
from explorer.search.search_state import SearchState
from explorer.spec.candidate import Candidate, Recompute
from explorer.spec.training import Sharding

MEASUREMENT = "measurement"
TRIAL_NUMBER = "bexp_trial"
MEMORY_CONSTRAINT = "feasible"
DIMENSIONS = (
    "micro_batch_size",
    "bta_tile",
    "recompute",
    "attention_backend",
    "expert_backend",
    "context_parallel_size",
    "context_parallel_layout",
    "sharding",
)


class ComponentSampler(BaseSampler):
    """Suggests the candidate whose missing components are worth their seconds most.

    It learns from the user attribute `measurement` (a `Measurement` as JSON) of a study's finished trials, by
    component rather than by objective value. Suggestions depend on the seed and the finished trials alone. When no
    measurement is worth its time it suggests the recommended candidate again.
    """

    def __init__(self, state: SearchState) -> None:
        self._state = state
        self._space = distributions(state.table.candidates)
        self._seen: set[int] = set()

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The dimensions, with every value that occurs in the space."""
        return self._space

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The next candidate's dimensions."""
        self._learn(study)
        found = self._state.suggest() or self._state.recommend()
        row = found.row if found is not None else 0
        return to_params(self._state.table.candidates[row])

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Never needed: every dimension is part of the relative search space."""
        raise ValueError(f"'{param_name}' is not a dimension of the space")

    def _learn(self, study: Study) -> None:
        finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.FAIL))
        fresh = [t for t in finished if t.number not in self._seen and MEASUREMENT in t.user_attrs]
        if fresh:
            self._seen.update(t.number for t in fresh)
            self._state.learn_trials(
                (t.user_attrs[TRIAL_NUMBER], Measurement.model_validate_json(t.user_attrs[MEASUREMENT])) for t in fresh
            )


def distributions(candidates: Sequence[Candidate]) -> dict[str, BaseDistribution]:
    """Optuna's view of a space: one categorical distribution a dimension."""

    def values(name: str) -> list[Any]:
        found = {_plain(getattr(c, name)) for c in candidates}
        return sorted(found, key=lambda v: (v is not None, v))

    return {name: CategoricalDistribution(values(name)) for name in DIMENSIONS}


def to_params(candidate: Candidate) -> dict[str, Any]:
    """A candidate's dimensions as Optuna parameters."""
    return {name: _plain(getattr(candidate, name)) for name in DIMENSIONS}


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Recompute | Sharding) else value


def to_candidate(params: dict[str, Any], num_query_groups: int) -> Candidate:
    """The candidate that Optuna parameters stand for."""
    return Candidate.model_validate({**params, "num_query_groups": num_query_groups})


def frozen_trial(trial: Trial, space: dict[str, BaseDistribution]) -> FrozenTrial:
    """A stored trial as a finished Optuna trial, for a study that has not seen it."""
    return create_trial(
        value=trial.tokens_per_second or 0.0,
        params=to_params(trial.candidate),
        distributions=space,
        user_attrs=user_attrs(trial),
        constraints={MEMORY_CONSTRAINT: _violation(trial)},
    )


def tell(study: Study, asked: OptunaTrial, trial: Trial) -> None:
    """Finish an asked trial with what was measured."""
    for key, value in user_attrs(trial).items():
        asked.set_user_attr(key, value)
    asked.set_constraint(MEMORY_CONSTRAINT, _violation(trial))
    study.tell(asked, trial.tokens_per_second or 0.0)


def user_attrs(trial: Trial) -> dict[str, Any]:
    """What a trial leaves in a study beside its value."""
    return {TRIAL_NUMBER: trial.number, MEASUREMENT: trial.measurement.model_dump_json()}


def _violation(trial: Trial) -> float:
    return -1.0 if trial.measurement.outcome is Outcome.OK else 1.0


def admits(study: Study, space: dict[str, BaseDistribution]) -> bool:
    """Whether a study may be asked for points of `space`: the choices of its dimensions can never change."""
    return all(
        trial.distributions.get(name, distribution) == distribution
        for trial in study.get_trials(deepcopy=False)
        for name, distribution in space.items()
    )


def reconcile(study: Study, history: Sequence[Trial], space: dict[str, BaseDistribution]) -> None:
    """Make a study the projection of the stored trials: running ones failed, missing ones added."""
    present: set[int] = set()
    for found in study.get_trials(deepcopy=False):
        if found.state is TrialState.RUNNING:
            study.tell(found.number, state=TrialState.FAIL)
        elif TRIAL_NUMBER in found.user_attrs:
            present.add(int(found.user_attrs[TRIAL_NUMBER]))
    for trial in history:
        if trial.kind is TrialKind.COMPONENTS and trial.number not in present:
            study.add_trial(frozen_trial(trial, space))
