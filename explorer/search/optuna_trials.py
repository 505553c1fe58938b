"""Candidates and trials as Optuna sees them: dimensions, values, constraints and user attributes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from bexp.explorer.records.measurement import Measurement, Outcome
from bexp.explorer.records.trial import Trial
from bexp.explorer.spec.candidate import Candidate, Recompute
from bexp.explorer.spec.training import Sharding
from bexp.explorer.spec.variant import Variant

MEASUREMENT = "measurement"
"""User attribute: the `Measurement` of a trial, as JSON."""
TRIAL_NUMBER = "bexp_trial"
"""User attribute: the number of the trial in its job; a study counts only the trials of its variant."""
REASON = "reason"
"""User attribute: why a trial was suggested."""
FEASIBLE = "feasible"
"""The constraint that a candidate runs and fits: above 0 where it does not."""
DIMENSIONS = (
    "micro_batch_size",
    "bta_tile",
    "recompute",
    "attention_backend",
    "expert_backend",
    "context_parallel_size",
    "context_parallel_layout",
    "sharding",
    "loss",
    "execution",
    "kernels",
    "settings",
)


def distributions(candidates: Sequence[Candidate]) -> dict[str, BaseDistribution]:
    """One categorical distribution a dimension, with every value that occurs among `candidates`."""

    def values(name: str) -> list[Any]:
        found = {_plain(value) for value in {getattr(c, name) for c in candidates}}
        return sorted(found, key=lambda v: (v is not None, v))

    return {name: CategoricalDistribution(values(name)) for name in DIMENSIONS}


def to_params(candidate: Candidate) -> dict[str, Any]:
    """A candidate's dimensions as Optuna parameters."""
    return {name: _plain(getattr(candidate, name)) for name in DIMENSIONS}


def to_candidate(params: dict[str, Any], variant: Variant) -> Candidate:
    """The candidate that Optuna parameters stand for."""
    return Candidate.model_validate({**params, **variant._asdict()})


def user_attrs(number: int, measurement: Measurement) -> dict[str, Any]:
    """What a trial has beside its parameters and its value."""
    return {TRIAL_NUMBER: number, MEASUREMENT: measurement.model_dump_json()}


def read_measurement(trial: FrozenTrial) -> tuple[int, Measurement] | None:
    """The number in its job and the measurement of an Optuna trial; null if nothing is measured yet."""
    if MEASUREMENT not in trial.user_attrs:
        return None
    return trial.user_attrs[TRIAL_NUMBER], Measurement.model_validate_json(trial.user_attrs[MEASUREMENT])


def final_state(trial: Trial) -> TrialState:
    """How Optuna sees a finished trial.

    A candidate that ran has a value. One that cannot run is complete as well, with its constraint violated, so that no
    sampler asks for it again. A contaminated trial, and one that measured what all candidates share, tells samplers
    nothing; Optuna's samplers ignore failed trials.
    """
    outcome = trial.measurement.outcome
    tells_nothing = outcome is Outcome.CONTAMINATED or (outcome is Outcome.OK and trial.tokens_per_second is None)
    return TrialState.FAIL if tells_nothing else TrialState.COMPLETE


def final_value(trial: Trial) -> float | None:
    """The objective of a finished trial: tokens/s, 0 for a candidate that cannot run; null if it tells nothing."""
    return (trial.tokens_per_second or 0.0) if final_state(trial) is TrialState.COMPLETE else None


def violation(trial: Trial) -> float:
    """The value of the constraint `FEASIBLE`."""
    return -1.0 if trial.measurement.outcome is Outcome.OK else 1.0


def frozen_trial(trial: Trial, space: dict[str, BaseDistribution]) -> FrozenTrial:
    """A stored trial as a finished Optuna trial, for a study that has not seen it."""
    return create_trial(
        state=final_state(trial),
        value=final_value(trial),
        params=to_params(trial.candidate),
        distributions=space,
        user_attrs=user_attrs(trial.number, trial.measurement),
        constraints={FEASIBLE: violation(trial)},
    )


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Recompute | Sharding) else value
